import { readFileSync } from "node:fs";

import { beforeEach, describe, expect, it } from "vitest";

import { codeForMesh } from "../../src/panel/code";
import { SpawnForm, previewOf } from "../../src/panel/spawn";
import { ACTIONS } from "../../src/panel/table";
import { empty, four } from "../made";

const places = [
  { name: "slurm", text: "slurm job", why: "there is no sbatch here", hosts: {} },
  { name: "ray", text: "ray job", why: "", hosts: {} },
  { name: "lab", text: "lab of monarch.toml (ssh)", why: "", hosts: { trainers: 3, loaders: 1 } },
];

function typed(form: SpawnForm, name: string, value: string): void {
  const field = form.node.querySelector<HTMLInputElement>(`[aria-label="${name}"]`) as HTMLInputElement;
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
}

beforeEach(() => localStorage.clear());

describe("the form of a new mesh", () => {
  it("shows the cell that it writes, and what comes of it", () => {
    const form = new SpawnForm(empty(), places, null);
    typed(form, "shape", "hosts=2 gpus=4");
    expect(form.node.querySelector("pre")?.textContent).toBe("%mesh workers hosts=2 gpus=4");
    expect(form.node.textContent).toContain("8 processes on 2 hosts");
    typed(form, "where", "ray");
    typed(form, "options of the job", "time=1:00:00");
    typed(form, "set-up", "import torch\n");
    expect(form.node.querySelector("pre")?.textContent).toBe("%%mesh workers hosts=2 gpus=4 --job ray time=1:00:00\nimport torch");
    expect(form.getValue()).toMatchObject({ job: "ray", inCell: true });
  });

  it("offers first what can be used, and says why the rest cannot", () => {
    const form = new SpawnForm(empty(), places, null);
    const options = [...form.node.querySelectorAll<HTMLOptionElement>("select option")];
    expect(options.map(({ textContent }) => textContent)).toEqual(["this machine", "ray job", "lab of monarch.toml (ssh)", "slurm job: there is no sbatch here"]);
    expect(options.map(({ disabled }) => disabled)).toEqual([false, false, false, true]);
  });

  it("counts the hosts that a job has for the mesh, and says where they do not fit", () => {
    const form = new SpawnForm(empty(), places, { job: "lab", name: "trainers", shape: "gpus=4" });
    expect(form.node.textContent).toContain("12 processes on 3 hosts");
    expect(form.node.querySelector("pre")?.textContent).toBe("%mesh trainers gpus=4 --job lab");
    typed(form, "shape", "hosts=2 gpus=4");
    expect(form.getValue()).toBe("lab has 3 hosts for trainers: leave hosts= out.");
    typed(form, "name", "others");
    expect(form.getValue()).toBe("lab has hosts for trainers and loaders: give the mesh one of these names.");
    const only = { name: "5e6f3a21", text: "job 5e6f3a21", why: "", hosts: { near: 2 } };
    expect(new SpawnForm(empty(), [only], { job: "5e6f3a21", name: "far", shape: "gpus=2" }).node.textContent).toContain("4 processes on 2 hosts");
  });

  it("proposes what was chosen before, where it can still be used", () => {
    localStorage.setItem("monarch-nb:spawned", JSON.stringify([{ job: "slurm", arguments: "partition=gpu", dims: "hosts=3 gpus=2" }]));
    const form = new SpawnForm(four(), places, null);
    expect(form.getValue()).toMatchObject({ name: "workers2", dims: { hosts: 3, gpus: 2 }, job: "", arguments: "" });
  });

  it("says what is wrong, and what is lost", () => {
    const form = new SpawnForm(four(), [], null);
    typed(form, "name", "workers");
    expect(form.node.textContent).toContain("workers is running. The same shape keeps it");
    typed(form, "shape", "gpus");
    expect(form.getValue()).toContain('"gpus" is not a dimension');
  });
});

it("counts processes", () => {
  expect(previewOf({ gpus: 1 })).toEqual({ text: "1 process", hosts: [1] });
  expect(previewOf({ hosts: 20, gpus: 2, more: 8 }).text).toBe("320 processes on 20 hosts");
  expect(codeForMesh({ name: "w", dims: { gpus: 1 }, job: "", arguments: "", setup: "x = 1" })).toBe("%%mesh w gpus=1\nx = 1");
});

it("the menu Mesh has all actions", () => {
  const schema = JSON.parse(readFileSync("schema/plugin.json", "utf8")) as { "jupyter.lab.menus": { main: { items: { command?: string }[] }[] } };
  const commands = schema["jupyter.lab.menus"].main[0]?.items.map(({ command }) => command);
  for (const action of ACTIONS) expect(commands).toContain(`monarch-nb:${action.name}`);
});
