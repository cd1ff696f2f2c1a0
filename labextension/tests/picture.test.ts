// The picture of a timeline is replaced in pieces, and only where it differs.

import { beforeEach, expect, it, vi } from "vitest";

import { Picture, partsOf, pieceOf } from "../src/views/picture";
import { frame } from "./made";

const bars = (count: number, about: string): string => `<g class="b"><rect/><title>${about}</title></g>`.repeat(count);
const row = (content: string): string => `<g class="r"><text>row</text>${content}</g><path class="ln" d="M0 20H600"/>`;
const picture = (rows: string[], width = 600, axis = "1 s"): string => `<svg xmlns="http://www.w3.org/2000/svg" class="mnb-tl" width="${width}"><text class="dim">${axis}</text><style></style>${rows.join("")}</svg>`;

let element: HTMLElement;
let shown: Picture;
const drawn = vi.fn();
const rows = (): Element[] => [...element.querySelectorAll(".r")];

beforeEach(() => {
  drawn.mockClear();
  element = document.createElement("div");
  shown = new Picture(element, drawn);
});

it("a picture consists of its head and its rows", () => {
  const { head, rows } = partsOf(picture([row("a"), row("b")]));
  expect(head).toMatch(/^<svg .*1 s<\/text><style><\/style>$/);
  expect(rows).toEqual([row("a"), row("b")]);
  expect(partsOf("")).toEqual({ head: "", rows: [] });
});

it("a piece is at least a row, and no more bars than a frame has time for", () => {
  const [small, large] = [row(bars(4, "x")), row(bars(30, "x"))];
  expect(pieceOf([small, small, small], 0, 10)).toBe(2);
  expect(pieceOf([large, small], 0, 10)).toBe(1);
  expect(pieceOf([large, small], 1, 10)).toBe(1);
  expect(pieceOf([], 0, 10)).toBe(0);
});

it("rows that are as they were stay the same elements", () => {
  shown.show(picture([row(bars(1, "a")), row(bars(1, "b"))]));
  const [first, second] = rows();
  const style = element.querySelector("style");
  shown.show(picture([row(bars(1, "a")), row(bars(1, "c"))], 700, "2 s"));
  expect(rows()[0]).toBe(first);
  expect(rows()[1]).not.toBe(second);
  expect(rows()[1]?.querySelector("title")?.textContent).toBe("c");
  expect(element.querySelector("svg")?.getAttribute("width")).toBe("700");
  expect(element.textContent).toContain("2 s");
  expect(element.textContent).not.toContain("1 s");
  expect([...element.querySelectorAll("style")], "whose change the whole page would feel").toEqual([style]);
});

it("rows that are no longer there are removed, new ones come behind", () => {
  shown.show(picture([row("a"), row("b"), row("c")]));
  shown.show(picture([row("a")]));
  expect(rows().map((each) => each.textContent)).toEqual(["rowa"]);
  shown.show(picture([row("a"), row("d")]));
  expect(rows().map((each) => each.textContent)).toEqual(["rowa", "rowd"]);
});

it("many bars come in several frames, each of which says so", async () => {
  shown.show(picture(Array.from({ length: 4 }, (_, at) => row(bars(30, `${at}`)))));
  expect(rows()).toHaveLength(1);
  await frame();
  expect(rows()).toHaveLength(2);
  await frame();
  await frame();
  expect(rows()).toHaveLength(4);
  expect(drawn).toHaveBeenCalledTimes(4);
});

it("a picture that has ended draws no more", async () => {
  shown.show(picture([row(bars(30, "a")), row(bars(30, "b"))]));
  shown.end();
  await frame();
  expect(rows()).toHaveLength(1);
});
