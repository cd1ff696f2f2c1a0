import { beforeEach, describe, expect, it, vi } from "vitest";

import { ClusterState } from "../../src/cluster/state";
import { TreeView, isStructural } from "../../src/panel/treeview";
import { four, many, turn } from "../made";

let state: ClusterState;
let view: TreeView;
const select = vi.fn();
const menu = vi.fn();
const key = vi.fn(() => false);

function shown(): HTMLElement[] {
  return [...view.node.querySelectorAll<HTMLElement>('[role="treeitem"]')];
}

function press(...keys: string[]): void {
  for (const key of keys) view.node.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
}

beforeEach(() => {
  document.body.replaceChildren();
  select.mockClear();
  menu.mockClear();
  state = four();
  view = new TreeView({ select, menu, key });
  document.body.append(view.node);
  view.show(state, 1000, true);
});

describe("the tree by keys", () => {
  it("goes up and down, opens and closes, as a tree does", () => {
    press("End");
    expect(view.selected).toBe("p:w:3");
    press("ArrowRight");
    expect(view.row?.expanded).toBe(true);
    press("ArrowRight");
    expect(view.selected).toBe("r:t:3");
    press("ArrowLeft");
    expect(view.selected).toBe("p:w:3");
    press("ArrowLeft", "ArrowLeft");
    expect(view.selected).toBe("m:w");
    press("Enter");
    expect(shown()).toHaveLength(1);
    press("ArrowRight", "Home", "ArrowUp");
    expect(view.selected).toBe("m:w");
    expect(shown()).toHaveLength(6);
  });

  it("tells assistive technology what is active, open, and where it is", () => {
    press("ArrowDown", "ArrowDown");
    const active = document.getElementById(view.node.getAttribute("aria-activedescendant") ?? "");
    expect(active?.getAttribute("aria-label")).toBe("gpus=0, idle");
    expect(active?.getAttribute("aria-selected")).toBe("true");
    expect(active?.getAttribute("aria-level")).toBe("2");
    expect([active?.getAttribute("aria-posinset"), active?.getAttribute("aria-setsize")]).toEqual(["2", "5"]);
    expect(active?.getAttribute("aria-expanded")).toBe("false");
    expect(shown()[1]?.hasAttribute("aria-expanded")).toBe(false);
  });

  it("opens the menu of what is selected by the menu key, and of what is clicked", () => {
    press("End");
    view.node.dispatchEvent(new MouseEvent("contextmenu", { bubbles: true, cancelable: true }));
    expect(menu).toHaveBeenCalledTimes(1);
    expect(view.selected).toBe("p:w:3");
    (shown()[2] as HTMLElement).dispatchEvent(new MouseEvent("contextmenu", { bubbles: true, clientX: 7, clientY: 8 }));
    expect(view.selected).toBe("p:w:0");
    expect(menu).toHaveBeenLastCalledWith(7, 8);
  });

  it("leaves keys with modifiers to the page", () => {
    const event = new KeyboardEvent("keydown", { key: "ArrowDown", ctrlKey: true, cancelable: true });
    view.node.dispatchEvent(event);
    expect(event.defaultPrevented).toBe(false);
    expect(view.selected).toBe("m:w");
  });
});

describe("the tree on the page", () => {
  it("marks states by letter as well as by colour", () => {
    turn(state, "w", 2, "failed", { detail: "killed" });
    view.show(state, 1000, false);
    const row = shown()[4] as HTMLElement;
    expect(row.dataset.state).toBe("failed");
    expect(row.querySelector(".mnb-mark")?.textContent).toBe("✕");
    expect([...(shown()[0] as HTMLElement).querySelectorAll(".mnb-mark")].map((mark) => mark.textContent)).toEqual(["✕ 1", "○ 3"]);
  });

  it("changes lines in place", () => {
    const before = shown();
    turn(state, "w", 1, "busy", { endpoint: "trainers.step" });
    view.show(state, 1000, false);
    expect(shown()).toEqual(before);
    expect(before[3]?.querySelector(".mnb-outline-note")?.textContent).toBe("trainers.step");
  });

  it("holds only the lines in sight, of however many there are", () => {
    state = many(1250);
    view.show(state, 1000, true);
    press("ArrowRight");
    expect(view.rows).toHaveLength(1252);
    expect(shown().length).toBeLessThan(60);
    press("End");
    expect(view.node.getAttribute("aria-activedescendant")).toBeTruthy();
  });

  it("reads its place only when it is scrolled: to read it while displays are drawn has the page laid out", () => {
    state = many(1250);
    view.show(state, 1000, true);
    press("ArrowRight");
    let top = 0;
    const read = vi.fn(() => top);
    Object.defineProperty(view.node, "scrollTop", { get: read, set: () => undefined });
    turn(state, "w", 2, "failed");
    view.show(state, 1000, false);
    expect(read).not.toHaveBeenCalled();
    const first = shown()[0];
    top = 500 * 24;
    view.node.dispatchEvent(new Event("scroll"));
    expect(read).toHaveBeenCalledOnce();
    expect(shown()[0]).not.toBe(first);
  });

  it("selects what is clicked, and another when that is gone", () => {
    (shown()[3] as HTMLElement).click();
    expect(view.selected).toBe("p:w:1");
    delete state.meshes.w;
    delete state.meshes.t;
    view.show(state, 1000, true);
    expect(view.selected).toBe("");
    expect(select).toHaveBeenLastCalledWith(null);
  });
});

it("meshes that come, go or stop change the structure; counts do not", () => {
  expect(isStructural(null)).toBe(true);
  expect(isStructural({ meshes: { w: null } })).toBe(true);
  expect(isStructural({ meshes: { w: { stopped: "by a click" } } })).toBe(true);
  expect(isStructural({ meshes: { w: { counts: { idle: 3 } } } })).toBe(false);
});
