// Measurements as curves: the stored points, and the tables that a chart draws.

export type CurvePoint = [x: number, y: number];

/** One rank's measurements of one name. A run that begins again at a smaller x is a curve of its own. */
export interface Line {
  label: string;
  points: CurvePoint[];
}

/** Mean, lowest and highest at an x. */
export type BandPoint = [x: number, mean: number, low: number, high: number];

const MOST = 4000; // points of a line

/** The measurements of one name, rank by rank. Old points are thinned out where there are many. */
export class Curves {
  private _lines = new Map<number, CurvePoint[]>();

  add(index: number, x: number, y: number): void {
    const line = this._lines.get(index);
    if (!line) {
      this._lines.set(index, [[x, y]]);
      return;
    }
    line.push([x, y]);
    if (line.length > MOST) this._lines.set(index, line.filter((_, position) => position % 2 || position > MOST / 2));
  }

  /** Forgets the oldest points of each line but this many. */
  keep(count: number): void {
    for (const line of this._lines.values()) line.splice(0, Math.max(0, line.length - count));
  }

  get ranks(): IterableIterator<number> {
    return this._lines.keys();
  }

  lines(label: (index: number) => string): Line[] {
    return [...this._lines].sort(([a], [b]) => a - b).map(([index, points]) => ({ label: label(index), points }));
  }
}

/** Mean, lowest and highest of all lines at each x. */
export function band(lines: readonly Pick<Line, "points">[]): BandPoint[] {
  const sums = new Map<number, { sum: number; count: number; low: number; high: number }>();
  for (const line of lines)
    for (const [x, y] of line.points) {
      if (!Number.isFinite(y)) continue;
      const existing = sums.get(x);
      if (existing) {
        existing.sum += y;
        existing.count++;
        existing.low = Math.min(existing.low, y);
        existing.high = Math.max(existing.high, y);
      } else sums.set(x, { sum: y, count: 1, low: y, high: y });
    }
  return [...sums].sort(([a], [b]) => a - b).map(([x, { sum, count, low, high }]) => [x, sum / count, low, high]);
}

/** The parts of a line in each of which x only grows. */
export function runsOf(points: readonly CurvePoint[]): CurvePoint[][] {
  const runs: CurvePoint[][] = [];
  let before = Infinity;
  for (const point of points) {
    if (point[0] < before) runs.push([]);
    before = point[0];
    runs.at(-1)?.push(point);
  }
  return runs;
}

/** The point that is nearest to an x, the newest of those that are equally near; undefined where there are none. */
export function nearest<P extends readonly [x: number, ...rest: number[]]>(points: readonly P[], x: number): P | undefined {
  let best: P | undefined;
  for (const point of points) if (!best || Math.abs(point[0] - x) <= Math.abs(best[0] - x)) best = point;
  return best;
}
