import fc from "fast-check";
import { describe, expect, it } from "vitest";

import { Facts, NOTHING, mayLoad, phaseOf, wantsComm, wordsFor } from "../../src/panel/link";

const READY: Facts = { ...NOTHING, notebook: true, kernel: true, language: "python", status: "idle", connected: true };

describe("how the panel stands with a kernel", () => {
  it.each<[string, Partial<Facts>, string]>([
    ["no notebook", { notebook: false }, "none"],
    ["no kernel", { kernel: false }, "no-kernel"],
    ["a dead kernel", { status: "dead" }, "no-kernel"],
    ["a restart", { status: "restarting", comm: "live" }, "starting"],
    ["another language", { language: "R" }, "foreign"],
    ["a kernel without the extension", { comm: "refused" }, "unloaded"],
    ["loading it", { comm: "refused", loading: true }, "loading"],
    ["a cluster", { comm: "live" }, "live"],
    ["a cluster of a busy kernel", { comm: "live", status: "busy" }, "live"],
  ])("%s", (_, facts, phase) => {
    expect(phaseOf({ ...READY, ...facts })).toBe(phase);
  });

  it("opens a comm only to a Python kernel that is there and has not refused", () => {
    expect(wantsComm(READY)).toBe(true);
    expect(wantsComm({ ...READY, language: "" })).toBe(false);
    expect(wantsComm({ ...READY, comm: "refused" })).toBe(false);
    expect(wantsComm({ ...READY, connected: false })).toBe(false);
    expect(wantsComm({ ...READY, status: "autorestarting" })).toBe(false);
  });

  it("always has words, and offers to load only where that is what is missing", () => {
    const facts = fc.record<Facts>({
      notebook: fc.boolean(),
      kernel: fc.boolean(),
      language: fc.constantFrom("", "python", "julia"),
      status: fc.constantFrom("unknown", "starting", "idle", "busy", "restarting", "autorestarting", "terminating", "dead"),
      connected: fc.boolean(),
      comm: fc.constantFrom("none", "opening", "live", "refused"),
      loading: fc.boolean(),
      error: fc.constantFrom("", "ModuleNotFoundError"),
    });
    fc.assert(
      fc.property(facts, (some) => {
        const words = wordsFor(some);
        expect(words.title).not.toBe("");
        expect(words.offersLoad).toBe(phaseOf(some) === "unloaded");
        expect(Boolean(words.code)).toBe(["unloaded", "live"].includes(phaseOf(some)));
      }),
    );
  });

  it("says what the panel is for and what to type, where there is nothing to show yet", () => {
    for (const [comm, typed] of [["refused", "%load_ext monarch"], ["live", "%mesh workers gpus=4"]] as const) {
      const words = wordsFor({ ...READY, comm });
      expect(words.text).toContain("processes and actors that a notebook starts");
      expect(words.code).toBe(typed);
    }
  });

  it("tells what went wrong, and looks again only after code that may have loaded it", () => {
    expect(wordsFor({ ...READY, comm: "refused", error: "not installed" }).text).toBe("not installed");
    expect(mayLoad("%load_ext monarch_nb")).toBe(true);
    expect(mayLoad("x = 1")).toBe(false);
  });
});
