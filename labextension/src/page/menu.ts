// A menu at a point of the window, for pages that have none of their own.

import { h } from "./dom";
import { say } from "./language";

export interface Item {
  label: string;
  title?: string;
  /** Pressed in the menu, it is this item. */
  key?: string;
  /** The first of another kind: a line above it. */
  apart?: boolean;
  run(): void;
}

/** Items, and others behind a label of their own, which are made when they are looked at. */
export interface Items {
  name: string;
  items: readonly Item[];
  more: { label: string; items(): readonly Item[] } | null;
}

/** Opens it within `root`, which has the style; it gives the keys back to what has them now. */
export function openMenu(root: HTMLElement, { name, items, more }: Items, x: number, y: number): void {
  const before = document.activeElement as HTMLElement | null;
  const menu = h("div", { class: "mnb-menu", role: "menu", "aria-label": name, popover: "manual" });
  let within = false; // the other items are shown
  const close = (): void => {
    document.removeEventListener("pointerdown", left, true);
    menu.remove();
  };
  const back = (): void => {
    close();
    before?.focus();
  };
  const left = (event: Event): void => void (menu.contains(event.target as Node) || close());
  const row = (item: Item, choose: () => void): HTMLElement =>
    h("button", { class: item.apart ? "mnb-menu-apart" : null, type: "button", role: "menuitem", tabindex: "-1", title: item.title, onclick: choose }, h("span", { text: item.label }), h("span", { class: "mnb-dim", text: item.key ?? "", "aria-hidden": "true" }));
  const choose = (item: Item): void => {
    back();
    item.run();
  };
  const show = (others: boolean): void => {
    within = others;
    const rows = (others && more ? more.items() : items).map((item) => row(item, () => choose(item)));
    if (more) rows.push(row({ label: others ? `‹ ${say`Back`}` : `${more.label} ›`, apart: true, run: () => undefined }, () => show(!others)));
    menu.replaceChildren(h("div", { class: "mnb-menu-name mnb-dim", role: "presentation", text: name }), ...rows);
    const { offsetWidth, offsetHeight } = menu;
    menu.style.left = `${Math.max(4, Math.min(x, window.innerWidth - offsetWidth - 4))}px`;
    menu.style.top = `${Math.max(4, Math.min(y, window.innerHeight - offsetHeight - 4))}px`;
    move(0);
  };
  const move = (to: number): void => {
    const rows = [...menu.querySelectorAll("button")];
    rows[(to + rows.length) % rows.length]?.focus();
  };
  menu.addEventListener("contextmenu", (event) => {
    event.preventDefault();
    event.stopPropagation();
  });
  menu.addEventListener("keydown", (event) => {
    event.stopPropagation(); // or the notebook takes letters for commands
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const rows = [...menu.querySelectorAll("button")];
    const at = rows.indexOf(document.activeElement as HTMLButtonElement);
    const last = rows.length - 1;
    const keys: Record<string, () => void> = {
      ArrowDown: () => move(at + 1),
      ArrowUp: () => move(at - 1),
      Home: () => move(0),
      End: () => move(last),
      ArrowRight: () => more && !within && at === last && show(true),
      ArrowLeft: () => within && show(false),
      Escape: back,
      Tab: back,
    };
    const item = items.find(({ key }) => !within && key === event.key.toUpperCase());
    const act = keys[event.key] ?? (item && (() => choose(item)));
    if (!act) return;
    event.preventDefault();
    act();
  });
  root.append(menu);
  if ("showPopover" in menu) menu.showPopover(); // above all else, and cut by nothing
  document.addEventListener("pointerdown", left, true);
  show(false);
}

/** Whether a key asks for the menu of what has the keys. */
export function asksForMenu(event: KeyboardEvent): boolean {
  return event.key === "ContextMenu" || (event.key === "F10" && event.shiftKey);
}
