// The section of profiles.

import { describe, expect, it } from "vitest";

import { Cluster } from "../src/cluster/client";
import type { FromKernel, ProfileMessage } from "../src/cluster/messages";
import { profileView } from "../src/views/profiles";

function shown(): { root: HTMLElement; tell: (...profiles: ProfileMessage["profiles"]) => void; end: () => void } {
  let id = "";
  let hear: (message: FromKernel) => void = () => undefined;
  const send = (message: object): void => {
    const told = message as { topic?: string; id?: string };
    if (told.topic === "profiles") id = told.id ?? "";
  };
  const cluster = new Cluster({ send, onMessage: (callback) => ((hear = callback), () => undefined) });
  const root = document.createElement("div");
  const end = profileView(cluster, root, {});
  return { root, tell: (...profiles) => hear({ type: "profiles", id, profiles }), end };
}

const one = (key: string): ProfileMessage["profiles"][number] => ({ key, title: `trainers ${key}`, html: `<ul><li>${key}</li></ul>` });

describe("profiles", () => {
  it("says how one is taken while there is none", () => {
    expect(shown().root.textContent).toContain("%%prof trainers");
  });

  it("shows the newest, and another one where it is picked, until there is a newer one", () => {
    const { root, tell, end } = shown();
    const pick = root.querySelector("select") as HTMLSelectElement;
    tell(one("1"));
    expect([root.querySelector("li")?.textContent, pick.hidden]).toEqual(["1", true]);
    tell(one("2"), one("1"));
    expect([root.querySelector("li")?.textContent, pick.hidden]).toEqual(["2", false]);
    pick.value = "1";
    pick.dispatchEvent(new Event("change"));
    expect(root.querySelector("li")?.textContent).toBe("1");
    const again = shown();
    again.tell(one("2"), one("1"));
    expect(again.root.querySelector("li")?.textContent, "drawn anew, it shows what was picked").toBe("1");
    tell(one("3"), one("2"), one("1"));
    expect(root.querySelector("li")?.textContent).toBe("3");
    end();
    expect(root.childElementCount).toBe(0);
  });
});
