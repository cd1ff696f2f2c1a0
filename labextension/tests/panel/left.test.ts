import { afterEach, beforeEach, expect, it, vi } from "vitest";

import { LeftSection } from "../../src/panel/sections";

const mesh = { uid: "m1", name: "away", held: false, text: "away {gpus=2}: 5m of its lease left" };
const job = { id: "5e6f3a21-7", label: "5e6f3a21 (lab)", text: "slurm job 5e6f3a21 (lab): trainers=4, 4 running", hosts: { trainers: 4 }, here: false };
const left = { meshes: [mesh], jobs: [job], text: "" };
const request = vi.fn((_verb: string) => Promise.resolve(left));
const take = vi.fn(() => Promise.resolve());
const useJob = vi.fn(() => Promise.resolve());
const endJob = vi.fn(() => Promise.resolve());
let section: LeftSection;

async function settle(ms = 0): Promise<void> {
  await vi.advanceTimersByTimeAsync(ms);
}

beforeEach(() => {
  vi.useFakeTimers();
  section = new LeftSection({ take, useJob, endJob } as never);
  document.body.append(section.node);
  section.shown = true;
  section.cluster = { request, watch: () => () => undefined } as never;
});
afterEach(() => {
  section.shown = false;
  section.node.remove();
  vi.useRealTimers();
});

it("meshes that were left are attached or stopped by buttons that keep the focus", async () => {
  await settle();
  const [attach, stop] = [...section.node.querySelectorAll("button")];
  expect([attach?.getAttribute("aria-label"), stop?.getAttribute("aria-label")]).toEqual(["Attach away", "Stop away"]);
  stop?.focus();
  mesh.text = "away {gpus=2}: 4m of its lease left";
  await settle(10_000);
  expect(section.node.textContent).toContain("4m of its lease");
  expect(document.activeElement).toBe(stop);
  stop?.click();
  expect(take).toHaveBeenCalledWith("end", mesh);
});

it("jobs are attached and stopped by whom they are not used, and looked for less often", async () => {
  await settle();
  const buttons = (): string[] => [...section.node.querySelectorAll("button")].map((button) => button.getAttribute("aria-label") ?? "");
  expect(section.node.textContent).toContain("trainers=4, 4 running");
  expect(buttons().slice(2)).toEqual(["Attach 5e6f3a21 (lab)", "Stop 5e6f3a21 (lab)"]);
  section.node.querySelectorAll("button")[2]?.click();
  section.node.querySelectorAll("button")[3]?.click();
  expect([useJob.mock.calls, endJob.mock.calls]).toEqual([[[job]], [[job]]]);
  await settle();
  request.mockClear();
  job.here = true;
  await settle(60_000);
  expect(request.mock.calls.filter(([verb]) => verb === "jobs").length).toBe(1);
  expect(buttons().slice(2)).toEqual(["Stop 5e6f3a21 (lab)"]);
  expect(section.node.textContent).toContain("used here");
});

it("says what it is where there are none, and which scheduler could not be asked", async () => {
  request.mockResolvedValue({ meshes: [], jobs: [], text: "slurm: squeue did not answer" });
  await settle(60_000);
  expect(section.node.textContent).toContain("no mesh was left: %detach NAME leaves one");
  expect(section.node.textContent).toContain("squeue did not answer");
  request.mockResolvedValue({ meshes: [], jobs: [], text: "" });
  await settle(60_000);
  expect(section.node.textContent).toContain("no job runs: %mesh NAME --job KIND");
});
