// The history of what processes have used: charts, peaks, and the timeline at a peak.

import { beforeEach, describe, expect, it, onTestFinished, vi } from "vitest";

import { Cluster } from "../src/cluster/client";
import type { FromKernel, HistoryCurves } from "../src/cluster/messages";
import { historyView } from "../src/views/history";
import { empty, frame } from "./made";

const measure = (timeline = ""): HistoryCurves["measures"][number] => ({ name: "CPU, cores", lines: [{ label: "gpus=0", points: [[-1, 0.5]] }], peak: "1.20 cores · gpus=3 · 14:03:11", at: 1005, timeline });

function shown(): { root: HTMLElement; sent: { topic?: string; key?: string; id?: string }[]; tell: (...measures: HistoryCurves["measures"]) => void } {
  const sent: { topic?: string; key?: string; id?: string }[] = [];
  let hear: (message: FromKernel) => void = () => undefined;
  const cluster = new Cluster({ send: (message) => void sent.push(message), onMessage: (callback) => ((hear = callback), () => undefined) });
  const root = document.createElement("div");
  onTestFinished(historyView(cluster, root, { mesh: "w" })); // it would draw in a later frame
  hear({ type: "snapshot", seq: 0, state: empty() });
  const id = (): string => sent.find(({ topic }) => topic === "history")?.id ?? "";
  return { root, sent, tell: (...measures) => hear({ type: "history", id: id(), name: "workers", ranks: 4, measures }) };
}

// This page draws nothing.
const pen = new Proxy({}, { get: (_, name) => (name === "measureText" ? () => ({ width: 0 }) : () => undefined), set: () => true });

beforeEach(() => {
  vi.stubGlobal("ResizeObserver", class { observe(): void {} disconnect(): void {} });
  vi.stubGlobal("Path2D", class { moveTo(): void {} lineTo(): void {} rect(): void {} arc(): void {} closePath(): void {} addPath(): void {} });
  vi.spyOn(HTMLCanvasElement.prototype, "getContext").mockReturnValue(pen as never);
});

describe("a history", () => {
  it("says when there are no samples yet, then draws each measure with its peak", async () => {
    const { root, tell } = shown();
    tell();
    expect(root.textContent).toContain("no samples yet");
    tell(measure());
    expect(root.textContent).toContain("History of workers · 4 ranks");
    expect(root.querySelector("figure")?.textContent).toContain("CPU, cores by minute");
    await frame();
    expect(root.querySelector("figure")?.textContent).toContain("gpus=0 0.5");
    expect(root.querySelector("button")?.textContent).toBe("peak 1.20 cores · gpus=3 · 14:03:11");
  });

  it("shows the timeline at a peak, or says that none was recorded", () => {
    const { root, sent, tell } = shown();
    tell(measure());
    root.querySelector("button")?.click();
    expect(root.querySelector("[role=status]")?.textContent).toContain("%timeline workers records one");
    tell(measure("7"));
    root.querySelector("button")?.click();
    expect(sent.filter(({ topic }) => topic === "timeline").at(-1)).toMatchObject({ key: "7" });
    expect(root.querySelector("[role=status]")?.textContent).toBe("");
  });
});
