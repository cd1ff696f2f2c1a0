// Profiles drawn by the kernel: the newest, or the picked one.

import type { ProfileMessage } from "../cluster/messages";
import { h } from "../page/dom";
import { say } from "../page/language";
import type { View } from "./view";

import "./profiles.css";

const nothing = (): string => say`no profiles yet: put ${"%%prof trainers"} in the first line of a cell`;

// Sections are drawn anew when the theme changes, and keep the picked profile.
let key = "";
let newest = "";

export const profileView: View<object> = (cluster, root) => {
  root.classList.add("mnb-profiles");
  const pick = h("select", { class: "mnb-pick", "aria-label": say`profile` });
  const picture = h("div", { class: "mnb-dim", text: nothing() });
  let profiles: ProfileMessage["profiles"] = [];
  let shownKey = "";
  const draw = (): void => {
    const profile = profiles.find((candidate) => candidate.key === key) ?? profiles[0];
    if (!profile || profile.key === shownKey) return;
    shownKey = profile.key;
    picture.className = "";
    picture.innerHTML = profile.html;
  };
  pick.addEventListener("change", () => {
    key = pick.value;
    draw();
  });
  const end = cluster.subscribe({ topic: "profiles" }, (message) => {
    profiles = message.profiles;
    pick.replaceChildren(...profiles.map((profile) => h("option", { value: profile.key, text: profile.title })));
    pick.hidden = profiles.length < 2;
    if (profiles[0]?.key !== newest) key = newest = profiles[0]?.key ?? "";
    pick.value = key;
    draw();
  });
  pick.hidden = true;
  root.append(pick, picture);
  return () => {
    end();
    root.replaceChildren();
  };
};
