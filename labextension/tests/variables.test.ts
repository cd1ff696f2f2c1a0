// The variables of ranks: what is asked, and what differs.

import { beforeEach, expect, it, vi } from "vitest";

import type { Cluster, Listener } from "../src/cluster/client";
import type { VariableRow } from "../src/cluster/messages";
import { variableView } from "../src/views/variables";

const row = (name: string, ...values: [text: string, where: string][]): VariableRow => ({ name, values: values.map(([text, where]) => ({ type: "int", text, where })), more: 0 });

let answers: VariableRow[][];
let asked: object[];
let connected: Listener;
const cluster = {
  live: true,
  watch: (listener: Listener) => ((connected = listener), () => undefined),
  request: (_: string, takes: object) => {
    asked.push(takes);
    return Promise.resolve({ rows: answers[Math.min(asked.length, answers.length) - 1], answered: 4 });
  },
};

const texts = (root: HTMLElement): string[][] => [...root.querySelectorAll("tr")].map((each) => [...each.querySelectorAll("th, td div")].map(({ textContent }) => textContent ?? ""));

beforeEach(() => {
  asked = [];
  cluster.live = true;
  vi.useFakeTimers();
  return () => vi.useRealTimers();
});

function shown(): { root: HTMLElement; end: () => void } {
  const root = document.createElement("div");
  const end = variableView(cluster as unknown as Cluster, root, { mesh: "w", ranks: [0, 1] });
  return { root, end };
}

it("a value of all ranks is shown once, others with the ranks that have them", async () => {
  answers = [[row("x", ["1", ""]), row("y", ["1", "gpus=0"], ["2", "gpus=1-3"])]];
  const { root, end } = shown();
  await vi.advanceTimersByTimeAsync(0);
  expect(asked).toEqual([{ mesh: "w", ranks: [0, 1] }]);
  expect(texts(root)).toEqual([["x", "1int"], ["y", "1int · gpus=0", "2int · gpus=1-3"]]);
  expect(root.querySelector("[role=status]")?.textContent).toBe("of 4 ranks");
  end();
});

it("ranks are asked again while it is shown, and rows that stay are the same elements", async () => {
  answers = [[row("x", ["1", ""]), row("y", ["1", ""])], [row("a", ["0", ""]), row("x", ["2", ""])]];
  const { root, end } = shown();
  await vi.advanceTimersByTimeAsync(0);
  const before = root.querySelector("tr");
  await vi.advanceTimersByTimeAsync(2000);
  expect(texts(root)).toEqual([["a", "0int"], ["x", "2int"]]);
  expect(root.querySelectorAll("tr")[1]).toBe(before);
  end();
  await vi.advanceTimersByTimeAsync(10_000);
  expect(asked).toHaveLength(2);
});

it("without a kernel nobody is asked before it is there", async () => {
  answers = [[]];
  cluster.live = false;
  const { root, end } = shown();
  expect(root.textContent).toContain("not connected");
  cluster.live = true;
  connected(null);
  await vi.advanceTimersByTimeAsync(0);
  expect(root.textContent).toContain("a cell that begins with %%on makes some");
  end();
});
