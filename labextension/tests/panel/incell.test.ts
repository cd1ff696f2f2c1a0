// Acting from displays in cells, where the page has no dialogs and no menus of its own.

import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import { Cluster } from "../../src/cluster/client";
import type { FromKernel } from "../../src/cluster/messages";
import { ACTIONS, targetAt } from "../../src/panel/table";
import { panelView } from "../../src/panel/cellpanel";
import type { PanelOptions } from "../../src/panel/cellpanel";
import { meshView } from "../../src/views/mesh";
import { four, many, turn } from "../made";

type Sent = Record<string, unknown>;

let root: HTMLElement;
let end: () => void;
let sent: Sent[];
let tell: (message: FromKernel) => void;

/** The answers of the kernel, by verb. */
const answers: Record<string, object> = { variables: { variables: { mine: "w" } }, kill: { text: "killed 1 proc of workers" }, stack: { stacks: { 1: "in Trainer.step" } }, places: { places: [] }, left: { meshes: [] }, jobs: { jobs: [], text: "" }, debug: { text: "breakpoint 1" } };

function cluster(state = four()): Cluster {
  sent = [];
  const channel = {
    send(message: object) {
      sent.push(message as Sent);
      const { type, id, verb } = message as Sent;
      if (type === "request") queueMicrotask(() => tell({ type: "reply", id: id as string, ok: true, result: answers[verb as string] ?? {} }));
    },
    onMessage(callback: (message: FromKernel) => void) {
      tell = callback;
      return () => undefined;
    },
  };
  const made = new Cluster(channel);
  queueMicrotask(() => tell({ type: "snapshot", seq: 0, state }));
  return made;
}

async function shows(view: (made: Cluster) => () => void, state = four()): Promise<void> {
  const made = cluster(state);
  end = view(made);
  await settled();
}

async function settled(): Promise<void> {
  await new Promise((done) => setTimeout(done, 60));
}

const cell = (index: number): HTMLElement => root.querySelector(`.mnb-cell[data-index="${index}"]`) as HTMLElement;
const items = (): string[] => [...root.querySelectorAll(".mnb-menu button > :first-child")].map(({ textContent }) => textContent ?? "");
const rightClick = (on: Element): boolean => on.dispatchEvent(new MouseEvent("contextmenu", { bubbles: true, cancelable: true, clientX: 20, clientY: 20 }));
const press = (on: Element, key: string, more: KeyboardEventInit = {}): boolean => on.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more }));
const choose = (text: string): void => ([...root.querySelectorAll<HTMLElement>(".mnb-menu button, .mnb-dialog button")].find((button) => button.textContent?.startsWith(text)) as HTMLElement).click();
const requests = (verb: string): Sent[] => sent.filter((message) => message.verb === verb);

beforeEach(() => {
  localStorage.clear();
  root = document.createElement("div");
  document.body.append(root);
});
afterEach(() => {
  end();
  root.remove();
});

describe("a mesh in a cell", () => {
  beforeEach(async () => shows((made) => meshView(made, root, { mesh: "w" })));

  it("offers all that the table has for a rank, and its code", async () => {
    expect(rightClick(cell(2))).toBe(false);
    const on = targetAt(four(), "w", [2], {});
    expect(items()).toEqual([...ACTIONS.filter((action) => on && action.applies(on)).map(({ label }) => label), "Code ›"]);
    await settled(); // the notebook's names are there
    choose("Code");
    expect(items()).toContain("%kill mine gpus=2");
    choose("%kill");
    await settled();
    expect(root.querySelector(".mnb-acted code")?.textContent).toBe("%kill mine gpus=2");
    expect(requests("kill")).toEqual([]);
  });

  it("asks once before something is lost, and says there what came of it", async () => {
    rightClick(cell(2));
    choose("Kill");
    await settled();
    expect(root.querySelector(".mnb-dialog")?.textContent).toContain("what they hold are lost");
    choose("Cancel");
    await settled();
    expect(requests("kill")).toEqual([]);
    press(cell(2), "k");
    await settled();
    choose("Kill");
    await settled();
    expect(requests("kill")).toMatchObject([{ mesh: "w", ranks: [2] }]);
    expect(root.querySelector(".mnb-message")?.textContent).toBe("killed 1 proc of workers");
    expect(root.querySelector(".mnb-acted code")?.textContent).toBe("%kill mine gpus=2");
  });

  it("is worked by keys alone", async () => {
    cell(1).focus();
    expect(press(cell(1), "F10", { shiftKey: true })).toBe(false);
    expect(document.activeElement?.textContent).toMatch(/^Stack/);
    press(document.activeElement as Element, "ArrowDown");
    expect(document.activeElement?.textContent).toMatch(/^Why/);
    press(document.activeElement as Element, "t");
    await settled();
    expect(requests("stack")).toMatchObject([{ mesh: "w", ranks: [1] }]);
    expect(root.querySelector(".mnb-answer pre")?.textContent).toBe("in Trainer.step");
    expect(root.querySelector(".mnb-menu")).toBe(null);
    expect(document.activeElement).toBe(cell(1));
    press(cell(1), "ContextMenu");
    press(document.activeElement as Element, "Escape");
    expect(document.activeElement).toBe(cell(1));
  });

  it("means all ranks that are selected, and the mesh where that is all of them", async () => {
    cell(1).click();
    cell(3).dispatchEvent(new MouseEvent("click", { bubbles: true, ctrlKey: true }));
    press(cell(3), "K", { shiftKey: true });
    await settled();
    expect(root.querySelector(".mnb-acted code")?.textContent).toBe("%kill mine gpus=1,3");
    press(cell(3), "a", { ctrlKey: true });
    press(cell(3), "K", { shiftKey: true });
    await settled();
    expect(root.querySelector(".mnb-acted code")?.textContent).toBe("%kill mine");
  });

  it("has the rest of the page's keys left alone", () => {
    expect(press(cell(1), "z")).toBe(true);
    expect(press(cell(1), "k", { ctrlKey: true })).toBe(true);
  });
});

it("hosts stand for all ranks on them", async () => {
  await shows((made) => meshView(made, root, { mesh: "w" }), many(40));
  ([...root.querySelectorAll("button")].find(({ textContent }) => textContent === "Hosts") as HTMLElement).click();
  cell(3).focus();
  press(cell(3), "K", { shiftKey: true });
  await settled();
  expect(root.querySelector(".mnb-acted code")?.textContent).toBe("%kill mine hosts=3");
});

it("slices stand for their own ranks", async () => {
  await shows((made) => meshView(made, root, { mesh: "w", ranks: [8, 9], labels: ["gpus"], sizes: [2] }), many(2));
  cell(1).focus();
  press(cell(1), "H", { shiftKey: true });
  await settled();
  expect(root.querySelector(".mnb-acted code")?.textContent).toBe("%heal mine hosts=1 gpus=1");
});

describe("the panel in a cell", () => {
  const show = (options: PanelOptions = {}, state = four()): Promise<void> => shows((made) => panelView(made, root, options), state);
  const tree = (): HTMLElement => root.querySelector(".mnb-outline") as HTMLElement;
  const label = (): (string | null)[] => [...root.querySelectorAll("summary")].map(({ textContent }) => textContent);

  it("has the tree, the sections and the summary of the panel, and remembers what is open", async () => {
    await show();
    expect(label()).toEqual(["Meshes", "Selected: workers", "Failures", "Findings", "Debugger", "Variables", "Timeline", "History", "Logs", "Tensors", "Transfers", "Left Running"]);
    expect(root.textContent).toContain("2 meshes · 4/4 ranks");
    const left = [...root.querySelectorAll("details")].at(-1) as HTMLDetailsElement;
    left.open = true;
    left.dispatchEvent(new Event("toggle"));
    await settled();
    expect(left.textContent).toContain("no mesh was left");
    expect(JSON.parse(localStorage.getItem("monarch-nb:sections") ?? "")).toContain("mnb-section-left");
  });

  it("acts on what is selected, by keys and by the menu", async () => {
    const state = four();
    turn(state, "w", 1, "failed");
    await show({}, state);
    press(tree(), "End");
    press(tree(), "K");
    await settled();
    choose("Kill");
    await settled();
    expect(requests("kill")).toMatchObject([{ mesh: "w", ranks: [3] }]);
    rightClick(tree());
    expect(items()).toContain("Kill and Heal");
    expect(items()).not.toContain("Break…"); // of processes there is none
  });

  it("sets a breakpoint where a person says", async () => {
    await show();
    press(tree(), "ArrowDown");
    press(tree(), "b");
    await settled();
    const input = root.querySelector(".mnb-dialog input") as HTMLInputElement;
    expect(input.value).toBe("Trainer.");
    input.value = "Trainer.step if loss > 4";
    press(input, "Enter");
    await settled();
    expect(requests("debug")).toMatchObject([{ do: "break", mesh: "t", where: "Trainer.step", condition: "loss > 4" }]);
    expect(root.querySelector(".mnb-acted code")?.textContent).toBe("%break Trainer.step if loss > 4 on trainers");
  });

  it("shows no code where cells have no magics", async () => {
    await show({ code: false });
    const buttons = [...root.querySelectorAll("button")].filter(({ textContent }) => ["Code", "Spawn…"].includes(textContent ?? ""));
    expect(buttons.map(({ hidden }) => hidden)).toEqual([true, true]);
    rightClick(tree());
    expect(items()).not.toContain("Code ›");
  });
});

vi.stubGlobal("ResizeObserver", class { observe = vi.fn(); disconnect = vi.fn(); });
