import { describe, expect, it, vi } from "vitest";

import { four } from "../made";

vi.mock("@jupyterlab/apputils", () => ({ InputDialog: {} }));

const { editFor, placeIn, placesOf } = await import("../../src/panel/oncell");

function moved(source: string, place: string): string {
  const { start, end, text } = editFor(source, place);
  return source.slice(0, start) + text + source.slice(end);
}

describe("where a cell runs", () => {
  it.each([
    ["x = 1", ""],
    ["%%on workers gpus=0-1\nx", "workers gpus=0-1"],
    ["\n%%on   workers ", "workers"],
    ["%%time\nx", null],
    ["%%only\nx", null],
    ["%time x", ""],
  ])("%j: %j", (source, place) => expect(placeIn(source)).toBe(place));

  it("is changed by its first line alone", () => {
    expect(moved("x = 1\n%%on y", "workers")).toBe("%%on workers\nx = 1\n%%on y");
    expect(moved("%%on workers\nx", "workers gpus=0")).toBe("%%on workers gpus=0\nx");
    expect(moved("%%on workers\nx", "")).toBe("x");
    expect(moved("%%on workers", "")).toBe("");
  });

  it("is one of the meshes there are, or what was chosen before", () => {
    const state = four();
    (state.meshes.t as { stopped?: string }).stopped = "by %stop";
    expect(placesOf(state, ["", "workers gpus=1", "workers"])).toEqual(["workers", "workers gpus=1"]);
  });
});
