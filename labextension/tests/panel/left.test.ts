import { Widget } from "@lumino/widgets";
import { afterEach, beforeEach, expect, it, vi } from "vitest";

vi.mock("@jupyterlab/apputils", () => ({ Dialog: {}, InputDialog: {}, showDialog: vi.fn() }));

const { LeftSection } = await import("../../src/panel/sections");

const mesh = { uid: "m1", name: "away", held: false, text: "away {gpus=2}: 5m of its lease left" };
const request = vi.fn(() => Promise.resolve({ meshes: [mesh] }));
const take = vi.fn(() => Promise.resolve());
let section: InstanceType<typeof LeftSection>;

async function settle(ms = 0): Promise<void> {
  await vi.advanceTimersByTimeAsync(ms);
}

beforeEach(() => {
  vi.useFakeTimers();
  section = new LeftSection({ take } as never);
  Widget.attach(section, document.body);
  section.cluster = { request, watch: () => () => undefined } as never;
});
afterEach(() => {
  section.dispose();
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

it("says what it is where there are none", async () => {
  request.mockResolvedValue({ meshes: [] });
  await settle(10_000);
  expect(section.node.textContent).toContain("no mesh was left: %detach NAME leaves one");
});
