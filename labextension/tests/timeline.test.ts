// The view of a timeline: what it shows, zoom, search, and both ends of a call.

import { beforeEach, describe, expect, it, vi } from "vitest";

import { Cluster } from "../src/cluster/client";
import type { FromKernel, TimelineMessage } from "../src/cluster/messages";
import { timelineView } from "../src/views/timeline";
import { empty } from "./made";

const bar = (about: string, call = ""): string => `<g class="b" data-n="x"${call && ` data-c="${call}"`}><rect/><title>${about}</title></g>`;
const SVG = `<svg width="600"><g class="r">${bar("trainers.step · train.py:7 · sent at 1.000 s", "c1")}${bar("trainers.load · sent at 2.000 s", "c2")}</g><g class="r">${bar("step · 0.50 s", "c1")}${bar("load · 0.20 s", "c2")}</g></svg>`;

interface Asked {
  type: string;
  topic?: string;
  id?: string;
  begin?: number | null;
  end?: number | null;
  verb?: string;
  do?: string;
}

function shown(options = {}, live = true): { root: HTMLElement; sent: Asked[]; tell: (more?: Partial<TimelineMessage>) => void; last: () => Asked | undefined; end: () => void } {
  const sent: Asked[] = [];
  let hear: (message: FromKernel) => void = () => undefined;
  const cluster = new Cluster({ send: (message) => void sent.push(message as Asked), onMessage: (callback) => ((hear = callback), () => undefined) });
  const root = document.createElement("div");
  document.body.append(root);
  const end = timelineView(cluster, root, options);
  if (live) hear({ type: "snapshot", seq: 0, state: empty() });
  const last = (): Asked | undefined => sent.filter(({ type, topic }) => type === "watch" && topic === "timeline").at(-1);
  const tell = (more: Partial<TimelineMessage> = {}): void =>
    hear({ type: "timeline", id: last()?.id ?? "", key: "1", name: "trainers", facts: ["10.0 s", "4 ranks"], notes: [], recording: false, began: 1000, seconds: 10, begin: 0, end: 10, svg: SVG, ...more });
  return { root, sent, tell, last, end };
}

const key = (root: HTMLElement, key: string): void => void root.querySelector("[role=group]")?.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const button = (root: HTMLElement, label: string): HTMLButtonElement => root.querySelector(`button[aria-label="${label}"]`) as HTMLButtonElement;
const chosen = (root: HTMLElement): number[] => [...root.querySelectorAll(".b")].flatMap((each, at) => (each.classList.contains("mnb-on") ? [at] : []));

beforeEach(() => {
  vi.stubGlobal("ResizeObserver", class { observe(): void {} disconnect(): void {} });
  document.body.replaceChildren();
});

describe("a timeline", () => {
  it("says how one is recorded while there is none", () => {
    const { root, tell } = shown();
    tell({ svg: "" });
    expect(root.textContent).toContain("%timeline trainers");
    tell();
    expect(root.textContent).toContain("Timeline of trainers");
    expect(root.textContent).not.toContain("no timeline yet");
  });

  it("shows what was saved without a kernel", () => {
    const { root, sent } = shown({ svg: SVG, name: "trainers", facts: ["3 calls"], seconds: 3 }, false);
    expect(root.textContent).toContain("Timeline of trainers · 3 calls");
    expect(sent.some(({ topic }) => topic === "timeline")).toBe(false);
  });

  it("has both ends of the chosen call stand out, and tells of both", () => {
    const { root, tell } = shown();
    tell();
    key(root, "ArrowDown");
    expect(chosen(root)).toEqual([0, 2]);
    key(root, "ArrowDown");
    expect(root.querySelector("[role=status]")?.textContent).toBe("step · 0.50 s — trainers.step · train.py:7 · sent at 1.000 s");
    key(root, "ArrowRight");
    expect(chosen(root)).toEqual([1, 3]);
    tell({ svg: SVG.replace("600", "601") });
    expect(chosen(root), "drawn anew").toEqual([1, 3]);
    key(root, "Escape");
    expect(chosen(root)).toEqual([]);
  });

  it("zooms, pans and goes back to all of it", () => {
    const { root, tell, last } = shown();
    expect(last()).toMatchObject({ begin: null, end: null });
    tell();
    button(root, "zoom in").click();
    expect(last()).toMatchObject({ begin: 2.5, end: 7.5 });
    tell({ begin: 2.5, end: 7.5 });
    expect(root.textContent).toContain("shown 2.50 to 7.50 s");
    button(root, "later").click();
    expect(last()).toMatchObject({ begin: 5, end: 10 });
    tell({ begin: 5, end: 10 });
    key(root, "-");
    expect(last()).toMatchObject({ begin: 2.5, end: 10 });
    key(root, "0");
    expect(last()).toMatchObject({ begin: 0, end: null });
  });

  it("finds what is searched for, and goes through it", () => {
    const { root, tell } = shown();
    tell();
    const query = root.querySelector("input") as HTMLInputElement;
    query.value = "LOAD";
    query.dispatchEvent(new Event("input"));
    expect(root.querySelectorAll(".mnb-other").length).toBe(2);
    expect(root.querySelector("[role=status]")?.textContent).toContain("2 matches");
    query.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
    expect(chosen(root)).toEqual([1, 3]);
  });

  it("can be stopped only while it is recorded", () => {
    const { root, sent, tell } = shown();
    const stop = [...root.querySelectorAll("button")].find(({ textContent }) => textContent === "Stop") as HTMLButtonElement;
    tell({ recording: true });
    expect(stop.hidden).toBe(false);
    stop.click();
    expect(sent.at(-1)).toMatchObject({ type: "request", verb: "timeline", do: "stop" });
    tell();
    expect(stop.hidden).toBe(true);
  });

  it("opens at a moment", () => {
    const { tell, last } = shown({ at: 1006 });
    tell();
    expect(last()).toMatchObject({ begin: 1, end: 11 });
  });
});
