import { describe, expect, it } from "vitest";

import { codeForSpawn, dimsFrom, freshName, newMeshFrom, wrongName } from "../../src/panel/code";

describe("the code of a click", () => {
  it("spawns", () => {
    expect(codeForSpawn("grid", { hosts: 2, gpus: 4 })).toBe("%mesh grid hosts=2 gpus=4");
  });
});

describe("what is typed to spawn a mesh", () => {
  it("is read", () => {
    expect(dimsFrom(" hosts=2, gpus=4 ")).toEqual({ hosts: 2, gpus: 4 });
    expect(newMeshFrom("grid", "gpus=4")).toEqual({ name: "grid", dims: { gpus: 4 } });
  });

  it.each([
    ["", "write at least one dimension"],
    ["4", '"4" is not a dimension'],
    ["gpus=0", "gpus must be at least 1"],
    ["gpus=1 gpus=2", "gpus is given twice"],
  ])("says what is wrong with %j", (text, told) => {
    expect(newMeshFrom("grid", text)).toContain(told);
  });

  it("needs the name of a variable, and proposes one", () => {
    expect(wrongName("my mesh")).toContain("cannot be the name of a variable");
    expect(newMeshFrom("", "gpus=4")).toBe("Give the mesh a name.");
    expect(freshName(["workers", "workers2"])).toBe("workers3");
  });
});
