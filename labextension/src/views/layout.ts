// The layout of the ranks of a mesh in a grid: some dimensions run across, the others down; long lines are folded.

import { countOf, pointOf } from "../cluster/ranks";

export interface Row {
  label: string;
  cells: number[];
}

export interface Layout {
  columns: number;
  rows: Row[];
  /** Names of the columns; none for folded lines. */
  heads: string[];
  corner: string;
}

interface Place {
  point: number[];
  offset: number;
}

const UNFOLDED = 32; // cells of a line that is never folded
const BLOCK_ROWS = 24;
const PAGE_WIDTH = 860; // px
const HEAD_WIDTH = 90;
const PITCHES = { l: 37, m: 24, s: 14 };

export type CellSize = keyof typeof PITCHES;

/** The cell of each index. `across` are the dimensions that run across; the others run down. */
export function layout(labels: readonly string[], sizes: readonly number[], across: number | readonly number[]): Layout {
  if (!sizes.length) return { columns: 1, heads: [], rows: [{ label: "", cells: [0] }], corner: "" };
  const columns = [across].flat().sort((a, b) => a - b);
  const lines = labels.map((_, d) => d).filter((d) => !columns.includes(d));
  const inner = placesOf(sizes, columns);
  const wide = inner.length > UNFOLDED ? fold(inner.length, countOf(sizes)) : inner.length;
  const folded = inner.length > wide;
  const prefix = lines.length || columns.length > 1 ? "" : `${labels[columns[0] ?? 0]} `;
  const rows: Row[] = [];
  for (const line of placesOf(sizes, lines)) {
    const label = lines.map((d, index) => `${labels[d]}=${line.point[index]}`).join(" ");
    for (let from = 0; from < inner.length; from += wide) {
      const part = inner.slice(from, from + wide);
      const range = folded ? `${prefix}${from}–${from + part.length - 1}` : "";
      rows.push({ label: [from ? "" : label, range].filter(Boolean).join(" "), cells: part.map((column) => line.offset + column.offset) });
    }
  }
  const heads = folded ? [] : inner.map((column) => column.point.join("·"));
  return { columns: wide, rows, heads, corner: folded ? "" : columns.map((d) => labels[d]).join("·") };
}

/** All points of some dimensions, with their offsets in the index. */
function placesOf(sizes: readonly number[], dims: readonly number[]): Place[] {
  const lengths = dims.map((d) => sizes[d] as number);
  const strides = dims.map((d) => countOf(sizes.slice(d + 1)));
  return Array.from({ length: countOf(lengths) }, (_, index) => {
    const point = pointOf(lengths, index);
    return { point, offset: point.reduce((sum, coordinate, i) => sum + coordinate * (strides[i] as number), 0) };
  });
}

function fold(line: number, count: number): number {
  const wide = count > 2000 ? 100 : count > 400 ? 50 : count > 128 ? 32 : 16;
  return [wide, 64, 50, 40, 32, 25, 20, 16].find((divisor) => divisor <= wide && line % divisor === 0) ?? wide;
}

/** Rows in blocks side by side, so that many short lines do not make one long column. */
export function blocksOf(plan: Layout, size: CellSize): Row[][] {
  const room = Math.max(1, Math.floor(PAGE_WIDTH / (plan.columns * PITCHES[size] + HEAD_WIDTH)));
  if (room < 2 || plan.rows.length <= BLOCK_ROWS) return [plan.rows];
  const rowsPerBlock = Math.max(16, Math.ceil(plan.rows.length / room));
  return Array.from({ length: Math.ceil(plan.rows.length / rowsPerBlock) }, (_, index) => plan.rows.slice(index * rowsPerBlock, (index + 1) * rowsPerBlock));
}
