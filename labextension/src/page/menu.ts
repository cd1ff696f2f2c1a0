// A menu at a point of the window, for pages without a menu of their own.

import { h } from "./dom";
import { say } from "./language";

export interface Item {
  label: string;
  title?: string;
  /** The key that selects this item in the menu. */
  key?: string;
  /** The first of another kind: a line above it. */
  apart?: boolean;
  run(): void;
}

/** Items, and further ones behind a label, created when they are opened. */
export interface Items {
  name: string;
  items: readonly Item[];
  more: { label: string; items(): readonly Item[] } | null;
}

/** Opens a menu within `root`, which has the style; closing it restores the focus. */
export function openMenu(root: HTMLElement, { name, items, more }: Items, x: number, y: number): void {
  const before = document.activeElement as HTMLElement | null;
  const menu = h("div", { class: "mnb-menu", role: "menu", "aria-label": name, popover: "manual" });
  let within = false; // the other items are shown
  const close = (): void => {
    document.removeEventListener("pointerdown", closeOutside, true);
    menu.remove();
  };
  const restoreFocus = (): void => {
    close();
    before?.focus();
  };
  const closeOutside = (event: Event): void => void (menu.contains(event.target as Node) || close());
  const row = (item: Item, choose: () => void): HTMLElement =>
    h("button", { class: item.apart ? "mnb-menu-apart" : null, type: "button", role: "menuitem", tabindex: "-1", title: item.title, onclick: choose }, h("span", { text: item.label }), h("span", { class: "mnb-dim", text: item.key ?? "", "aria-hidden": "true" }));
  const choose = (item: Item): void => {
    restoreFocus();
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
    event.stopPropagation(); // else the notebook takes letters for commands
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const rows = [...menu.querySelectorAll("button")];
    const index = rows.indexOf(document.activeElement as HTMLButtonElement);
    const last = rows.length - 1;
    const keys: Record<string, () => void> = {
      ArrowDown: () => move(index + 1),
      ArrowUp: () => move(index - 1),
      Home: () => move(0),
      End: () => move(last),
      ArrowRight: () => more && !within && index === last && show(true),
      ArrowLeft: () => within && show(false),
      Escape: restoreFocus,
      Tab: restoreFocus,
    };
    const item = items.find(({ key }) => !within && key === event.key.toUpperCase());
    const act = keys[event.key] ?? (item && (() => choose(item)));
    if (!act) return;
    event.preventDefault();
    act();
  });
  root.append(menu);
  if ("showPopover" in menu) menu.showPopover(); // above all else, and cut by nothing
  document.addEventListener("pointerdown", closeOutside, true);
  show(false);
}

/** Whether a key opens the menu of the focused element. */
export function asksForMenu(event: KeyboardEvent): boolean {
  return event.key === "ContextMenu" || (event.key === "F10" && event.shiftKey);
}
