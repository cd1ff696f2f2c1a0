// Profiles as the kernel draws them: the newest, or the one that is picked.

import type { ProfileMessage } from "../cluster/messages";
import { h } from "../page/dom";
import { say } from "../page/language";
import type { View } from "./view";

import "./profiles.css";

const nothing = (): string => say`no profiles yet: put ${"%%prof trainers"} in the first line of a cell`;

// Sections are drawn anew when the theme changes, and keep what was picked.
let picked = "";
let newest = "";

export const profileView: View<object> = (cluster, root) => {
  root.classList.add("mnb-profiles");
  const pick = h("select", { class: "mnb-pick", "aria-label": say`profile` });
  const drawn = h("div", { class: "mnb-dim", text: nothing() });
  let profiles: ProfileMessage["profiles"] = [];
  let shown = "";
  const draw = (): void => {
    const one = profiles.find((each) => each.key === picked) ?? profiles[0];
    if (!one || one.key === shown) return;
    shown = one.key;
    drawn.className = "";
    drawn.innerHTML = one.html;
  };
  pick.addEventListener("change", () => {
    picked = pick.value;
    draw();
  });
  const end = cluster.subscribe({ topic: "profiles" }, (message) => {
    profiles = message.profiles;
    pick.replaceChildren(...profiles.map((one) => h("option", { value: one.key, text: one.title })));
    pick.hidden = profiles.length < 2;
    if (profiles[0]?.key !== newest) picked = newest = profiles[0]?.key ?? "";
    pick.value = picked;
    draw();
  });
  pick.hidden = true;
  root.append(pick, drawn);
  return () => {
    end();
    root.replaceChildren();
  };
};
