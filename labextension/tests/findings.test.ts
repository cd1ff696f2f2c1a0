// Findings: what a click asks for, and how the answer is drawn.

import { describe, expect, it } from "vitest";

import type { Cluster } from "../src/cluster/client";
import type { Diagnosis } from "../src/cluster/messages";
import { findingsView, phaseStrip } from "../src/views/findings";

const FOUND: Diagnosis = {
  findings: [{ kind: "missing_from_collective", mesh: "workers", text: "gpus=1 has not begun all_reduce no. 3", perhaps: false, sure: true }],
  inspected: "3 processes of workers",
  text: "",
};

async function clicked(root: HTMLElement, label: string): Promise<void> {
  [...root.querySelectorAll("button")].find((button) => button.textContent === label)?.click();
  for (let turn = 0; turn < 5; turn++) await Promise.resolve();
}

describe("findings", () => {
  it("ask about the mesh that is meant, and offer to end the calls only where something was found", async () => {
    const asked: [string, object][] = [];
    const answers: Record<string, object> = { why: FOUND, abort: { findings: [], inspected: "3 processes of workers", text: "ended: workers.run()" } };
    const cluster = {
      request: (verb: string, takes: object) => {
        asked.push([verb, takes]);
        return Promise.resolve(answers[verb]);
      },
    } as unknown as Cluster;
    const root = document.createElement("div");
    const end = findingsView(cluster, root, { mesh: "m1" });
    const abort = [...root.querySelectorAll("button")].find((button) => button.textContent === "End these calls");
    expect(abort?.hidden).toBe(true);
    await clicked(root, "Why?");
    expect(root.querySelector(".mnb-finding")?.textContent).toBe("missing from collective · workersgpus=1 has not begun all_reduce no. 3");
    expect(abort?.hidden).toBe(false);
    await clicked(root, "End these calls");
    expect(root.textContent).toContain("ended: workers.run()");
    expect(abort?.hidden).toBe(true);
    expect(asked).toEqual([["why", { mesh: "m1" }], ["abort", { mesh: "m1" }]]);
    end();
    expect(root.childNodes.length).toBe(0);
  });

  it("draw a bar for each rank, in the order of a step, with words beside the colours", () => {
    const strip = phaseStrip([
      { mesh: "workers", where: "gpus=0", shares: { collective: 0.6, forward: 0.4, idle: 0 } },
      { mesh: "workers", where: "gpus=1", shares: { forward: 0.9, collective: 0.1 } },
    ]);
    const bars = [...strip.querySelectorAll(".mnb-phases")];
    expect(bars.map((bar) => bar.getAttribute("aria-label"))).toEqual(["forward 40 %, collective 60 %", "forward 90 %, collective 10 %"]);
    expect([...strip.querySelectorAll(".mnb-legend span")].map((each) => each.textContent)).toEqual(["forward", "collective"]);
  });
});
