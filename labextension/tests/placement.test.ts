// The picture of a placement: what is lit with what, how keys walk, and what the last cell moved.

import { describe, expect, it } from "vitest";

import { Cluster } from "../src/cluster/client";
import type { DrawingData, FromKernel, Piece, PlacementData } from "../src/cluster/messages";
import type { Movement, TensorRow, Tensors } from "../src/cluster/state";
import { size } from "../src/page/words";
import { nextTo } from "../src/views/drawing";
import { byDimension, factsOf, movedText } from "../src/views/moves";
import { PlacementPicture } from "../src/views/placement";
import { tensorView } from "../src/views/tensors";
import { drawn } from "./made";

const box = (x: number, y: number, more: Partial<Piece> = {}): Piece => ({ x, y, w: 9, h: 9, fill: "#000000", ...more });

const drawing = (pieces: Piece[]): DrawingData => ({ width: 40, height: 40, sheets: [], sides: [], labels: [], pieces });

// Two shards, the first on ranks 0 and 1, the second on rank 2; rank 3 has nothing.
const PLACEMENT: PlacementData = {
  name: "t",
  title: "4×4 float32",
  mesh_text: "data=4",
  bytes: "64 B",
  rows: [["data=4", "Shard(0)", "cuts dimension 0"]],
  blocks: ["t[0:2, :] · 2×4 · ranks 0-1", "t[2:4, :] · 2×4 · rank 2"],
  tensor: drawing([box(0, 0, { blocks: [0], description: "t[0:2, :] · 2×4 · ranks 0-1" }), box(0, 10, { blocks: [1], description: "t[2:4, :] · 2×4 · rank 2" })]),
  mesh: drawing([0, 1, 2, 3].map((rank) => box(10 * rank, 0, { ranks: [rank], blocks: [[0], [0], [1], []][rank] as number[], description: `rank ${rank}`, text: String(rank) }))),
};

describe("keys", () => {
  const grid = [box(0, 0), box(10, 0), box(0, 10), box(10, 10), box(20, 5)];

  it("go to the nearest box that way, and stay where there is none", () => {
    expect([nextTo(grid, 0, [1, 0]), nextTo(grid, 0, [0, 1]), nextTo(grid, 3, [-1, 0]), nextTo(grid, 3, [0, -1])]).toEqual([1, 2, 2, 1]);
    expect(nextTo(grid, 0, [-1, 0])).toBe(0);
    expect(nextTo(grid, 4, [1, 0])).toBe(4);
  });
});

describe("what moved", () => {
  const move = (at: string, collective: string, dimension: string, count: number, nbytes: number): Movement => ({ line: { at, source: "" }, operation: "aten.mm", collective, dimension, count, nbytes });

  it("is one sentence, with the line that moved most often", () => {
    expect(movedText([])).toBe("the last cell moved nothing between ranks");
    expect(movedText([move("Cell In[4]:7", "all-gather", "data", 9, 900 << 20), move("Cell In[4]:9", "all-gather", "model", 5, 300 << 20)])).toBe(
      "the last cell moved 1.17 GB in 14 all-gathers; 9 of them from Cell In[4]:7",
    );
    expect(movedText([move("Cell In[4]:7", "all-reduce", "data", 1, 64)])).toBe("the last cell moved 64 B in 1 all-reduce, from Cell In[4]:7");
  });

  it("is summed by dimension and collective, the most bytes first", () => {
    const rows = byDimension([move("a", "all-gather", "data", 1, 8), move("b", "all-reduce", "model", 1, 64), move("c", "all-gather", "data", 2, 16)]);
    expect(rows).toEqual([["model", "all-reduce", 1, 64], ["data", "all-gather", 3, 24]]);
  });

  it("and sizes have three digits, as the kernel writes them", () => {
    expect([0, 512, 1000, 1 << 20, 15 * 1024, 300 * (1 << 20)].map(size)).toEqual(["0 B", "512 B", "0.98 kB", "1.00 MB", "15.0 kB", "300 MB"]);
    const one = { labels: ["data"], sizes: [4], count: 1, nbytes: 64, largest: 16, lost: "", gone: 0 };
    expect(factsOf(one)).toBe("data=4 · 1 tensor · 64 B · 16 B on the fullest rank");
    expect(factsOf({ ...one, count: 3, gone: 2 })).toBe("data=4 · 3 tensors · 2 of them lost · 64 B · 16 B on the fullest rank");
    expect(factsOf({ ...one, lost: "the mesh was stopped", gone: 1 })).toBe("data=4 · 1 tensor, lost · 64 B");
  });
});

describe("the picture", () => {
  const made = (): { picture: PlacementPicture; tensor: Element[]; mesh: Element[]; lit: () => string[]; said: () => string } => {
    const picture = new PlacementPicture(structuredClone(PLACEMENT));
    document.body.replaceChildren(picture.element);
    const [tensor, mesh] = [...picture.element.querySelectorAll("svg")].map((drawn) => [...drawn.querySelectorAll("[data-at]")]) as [Element[], Element[]];
    const lit = (): string[] => [...tensor.map((box, at) => `${at ? "t1" : "t0"}:${box.classList.contains("mnb-lit")}`), ...mesh.map((box, at) => `r${at}:${box.classList.contains("mnb-lit")}`)].filter((one) => one.endsWith(":true")).map((one) => one.slice(0, 2));
    return { picture, tensor, mesh, lit, said: () => picture.element.querySelector(".mnb-description span")?.textContent ?? "" };
  };
  const at = (box: Element | undefined, type: string): boolean => box?.dispatchEvent(new Event(type, { bubbles: true })) ?? false;

  it("lights the ranks of the shard under the pointer, and the shard of the rank", () => {
    const { tensor, mesh, lit, said } = made();
    at(tensor[0], "pointermove");
    expect(lit()).toEqual(["t0", "r0", "r1"]);
    expect(said()).toContain("ranks 0-1");
    at(mesh[2], "pointermove");
    expect(lit()).toEqual(["t1", "r2"]);
    expect(said()).toBe("rank 2 · holds t[2:4, :] · 2×4 · rank 2");
    mesh[2]?.parentElement?.dispatchEvent(new Event("pointerleave"));
    expect(lit()).toEqual([]);
  });

  it("keeps what is clicked until it is clicked again", () => {
    const { tensor, mesh, lit, picture } = made();
    at(tensor[1], "click");
    expect(lit()).toEqual(["t1", "r2"]);
    expect(mesh.map((box) => box.getAttribute("aria-pressed"))).toEqual(["false", "false", "true", "false"]);
    expect((picture.element.querySelector(".mnb-description button") as HTMLElement).hidden).toBe(false);
    at(tensor[1], "click");
    expect(lit()).toEqual([]);
  });

  it("is walked through by keys, one stop of Tab for each drawing", () => {
    const { mesh } = made();
    const key = (name: string): void => void mesh[0]?.parentElement?.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
    key("ArrowRight");
    key("ArrowRight");
    expect(mesh.map((box) => box.getAttribute("tabindex"))).toEqual(["-1", "-1", "0", "-1"]);
    expect(document.activeElement).toBe(mesh[2]);
    key("Enter");
    expect(mesh[2]?.getAttribute("aria-pressed")).toBe("true");
    key("Escape");
    expect(mesh[2]?.getAttribute("aria-pressed")).toBe("false");
  });

  it("marks ranks that are not well, and takes the mark away", () => {
    const { picture, mesh } = made();
    picture.mark((rank) => (rank === 1 ? "✕" : ""));
    expect(mesh.map((box) => box.textContent)).toEqual(["0", "✕", "2", "3"]);
    picture.mark(() => "");
    expect(mesh[1]?.textContent).toBe("1");
  });
});

describe("the list of tensors", () => {
  const row = (number: number, name: string): TensorRow => ({ number, name, title: "4×4 float32", placement: ["Shard(0)"], nbytes: 64, each: 16, line: { at: "Cell In[1]:2", source: "" }, picture: [], lost: false });
  const tensors = (...rows: TensorRow[]): Tensors => ({ name: "tensors", mesh: "u", ranks: [0], labels: ["data"], sizes: [4], count: rows.length, nbytes: 64, lost: "", gone: 0, live: [16], largest: 16, rows, moved: [], waits: [], busy: [], memory: null });

  it("keeps a tensor open while the list changes, and when it is hidden and shown again; it closes with the tensor", async () => {
    let tell: (message: FromKernel) => void = () => undefined;
    const channel = {
      send: (message: { type?: string; id?: string; verb?: string }) => {
        if (message.verb === "placement") queueMicrotask(() => tell({ type: "reply", id: message.id ?? "", ok: true, result: { placement: PLACEMENT, mesh: "u", ranks: [0] } }));
      },
      onMessage: (callback: (message: FromKernel) => void) => {
        tell = callback;
        return () => undefined;
      },
    };
    const cluster = new Cluster(channel);
    const open = { id: "" };
    const mounted = (): { root: HTMLElement; end: () => void } => {
      const root = document.createElement("div");
      document.body.replaceChildren(root);
      return { root, end: tensorView(cluster, root, { open }) };
    };
    const first = mounted();
    tell({ type: "snapshot", seq: 0, state: { tensors: { "1": tensors(row(5, "w")) } } });
    await drawn();
    first.root.querySelector<HTMLElement>("[data-tensor] button")?.click();
    await drawn();
    expect(first.root.querySelectorAll(".mnb-open .mnb-drawing")).toHaveLength(2);
    tell({ type: "delta", prev: 0, seq: 1, patch: { tensors: { "1": { ...tensors(row(5, "w"), row(6, "t")) } } } });
    await drawn();
    expect(first.root.querySelectorAll("[data-tensor]")).toHaveLength(2);
    expect(first.root.querySelectorAll(".mnb-open .mnb-drawing")).toHaveLength(2);
    first.end();
    const again = mounted();
    tell({ type: "snapshot", seq: 1, state: { tensors: { "1": tensors(row(5, "w"), row(6, "t")) } } });
    await drawn();
    expect(again.root.querySelectorAll(".mnb-open .mnb-drawing")).toHaveLength(2);
    tell({ type: "delta", prev: 1, seq: 2, patch: { tensors: { "1": { ...tensors(row(6, "t")) } } } });
    await drawn();
    expect(again.root.querySelectorAll(".mnb-open")).toHaveLength(0);
    expect(open.id).toBe("");
    again.end();
  });

  it("keeps in a cell what has ended, greyed and with the time; the panel shows only what there is", async () => {
    let tell: (message: FromKernel) => void = () => undefined;
    const channel = {
      send: () => undefined,
      onMessage: (callback: (message: FromKernel) => void) => {
        tell = callback;
        return () => undefined;
      },
    };
    const cluster = new Cluster(channel);
    const [cell, panel] = [document.createElement("div"), document.createElement("div")];
    document.body.replaceChildren(cell, panel);
    const ends = [tensorView(cluster, cell, {}), tensorView(cluster, panel, { current: true })];
    tell({ type: "snapshot", seq: 0, state: { tensors: { "1": tensors(row(5, "w")), "2": tensors(row(6, "t")) } } });
    await drawn();
    tell({ type: "delta", prev: 0, seq: 1, patch: { tensors: { "1": null } } });
    await drawn();
    expect(cell.querySelectorAll("[data-tensor]")).toHaveLength(2);
    expect(cell.querySelectorAll(".mnb-over [data-tensor]")).toHaveLength(1);
    expect(cell.querySelector(".mnb-over-since")?.textContent).toMatch(/stopped at \d\d:\d\d:\d\d; this is what it held/);
    expect(panel.querySelectorAll("[data-tensor]")).toHaveLength(1);
    tell({ type: "delta", prev: 1, seq: 2, patch: { tensors: { "1": { ...tensors(row(5, "w")) } } } });
    await drawn();
    expect(cell.querySelectorAll(".mnb-over")).toHaveLength(0);
    for (const end of ends) end();
  });
});

describe("the values of a tensor", () => {
  const LOOK = { corner: [["1", "nan"], ["3", "4"]], index: "[0:2, 0:2]", columns: ["ranks", "elements", "min", "max", "mean", "NaN", "inf"], rows: [["0-1", "8", "1", "4", "2.6667", "1", "0"]], notes: ["rank 3: its process has ended"] };

  const shown = (answer: (id: string) => FromKernel): { root: HTMLElement; tell: (message: FromKernel) => void; asked: object[] } => {
    let tell: (message: FromKernel) => void = () => undefined;
    const asked: object[] = [];
    const channel = {
      send: (message: { type?: string; id?: string; verb?: string }) => {
        if (message.verb !== "values") return;
        asked.push(message);
        queueMicrotask(() => tell(answer(message.id ?? "")));
      },
      onMessage: (callback: (message: FromKernel) => void) => {
        tell = callback;
        return () => undefined;
      },
    };
    const root = document.createElement("div");
    document.body.replaceChildren(root);
    tensorView(new Cluster(channel), root, { placement: PLACEMENT, mesh: "u", ranks: [0], of: ["1", 5] });
    return { root, tell, asked };
  };
  const button = (root: HTMLElement, text: string): HTMLButtonElement | undefined => [...root.querySelectorAll<HTMLButtonElement>(".mnb-values button")].find((one) => one.textContent === text && !one.hidden);

  it("are said to be had by a cell where there is no kernel, and asked for where there is one", async () => {
    const { root, tell, asked } = shown((id) => ({ type: "reply", id, ok: true, result: LOOK }));
    expect(root.querySelector(".mnb-values")?.textContent).toContain("t.full_tensor()");
    expect(button(root, "show values")).toBeUndefined();
    tell({ type: "snapshot", seq: 0, state: {} });
    await drawn();
    button(root, "show values")?.click();
    await drawn();
    expect(asked).toMatchObject([{ tensors: "1", number: 5 }]);
    expect([...root.querySelectorAll(".mnb-corner td")].map((cell) => cell.textContent)).toEqual(["1", "nan", "3", "4"]);
    expect([...root.querySelectorAll(".mnb-odd")].map((cell) => cell.textContent)).toEqual(["nan", "1"]);
    expect(root.querySelector(".mnb-found")?.textContent).toContain("t[0:2, 0:2]");
    expect(root.querySelector(".mnb-note")?.textContent).toBe("rank 3: its process has ended");
    button(root, "hide")?.click();
    expect(root.querySelector(".mnb-found")?.childElementCount).toBe(0);
    expect(button(root, "show values")).toBeDefined();
  });

  it("go away where they cannot be had any more, and the line says why", async () => {
    const answers: FromKernel[] = [];
    const { root, tell } = shown((id) => ({ ...(answers.shift() as FromKernel), id }) as FromKernel);
    tell({ type: "snapshot", seq: 0, state: {} });
    await drawn();
    answers.push({ type: "reply", id: "", ok: true, result: LOOK }, { type: "reply", id: "", ok: false, error: "this tensor is gone: nothing refers to it any more" });
    button(root, "show values")?.click();
    await drawn();
    button(root, "show again")?.click();
    await drawn();
    expect(root.querySelectorAll(".mnb-corner")).toHaveLength(0);
    expect(root.querySelector(".mnb-values .mnb-wrong")?.textContent).toContain("nothing refers to it any more");
  });
});
