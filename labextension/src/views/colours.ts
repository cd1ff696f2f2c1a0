// Colours of ranks by something other than their state: resource use, or a metric of their actors.

import type { Cluster } from "../cluster/client";
import type { MetricMessage } from "../cluster/messages";
import type { Rank, RankRecords } from "../cluster/state";
import { say } from "../page/language";
import { bytes, number, plural } from "../page/words";

export interface Colour {
  name: string;
  /** The value of a rank; `index` is that of the whole mesh. */
  of(rank: Partial<Rank>, index: number): number | undefined;
  show(value: number): string;
  /** The least end of the scale. */
  top?: number;
  /** Whether the scale begins at the lowest value that is shown, and not at zero. */
  ranged?: boolean;
}

const percent = (value: number): string => `${Math.round(value * 100)} %`;

const USES: Readonly<Record<string, Colour>> = {
  cpu: { name: "CPU", of: (rank) => rank.cpu, show: percent, top: 1 },
  memory: { get name() { return say`memory`; }, of: (rank) => rank.memory, show: bytes },
  gpu: { name: "GPU", of: (rank) => rank.gpu, show: percent, top: 1 },
  gpu_memory: { get name() { return say`GPU memory`; }, of: (rank) => rank.gpu_memory, show: bytes },
  queue: { get name() { return say`queue`; }, of: (rank) => rank.queue, show: (value) => plural(value, "message") },
  rate: { name: "calls/s", of: (rank) => rank.rate, show: (value) => `${value} calls/s` },
  errors: { get name() { return say`errors`; }, of: (rank) => rank.errors, show: (value) => plural(value, "error") },
};

const LOOKED = 64; // ranks that are checked for available metrics

/** The prefix of the keys of metrics. */
export const METRIC = "metric:";

/** Stores the newest value of each metric; subscribes at the first use. */
export class LatestMetrics {
  readonly values = new Map<string, Map<number, number>>(); // name -> index -> value

  constructor(
    private _cluster: Cluster,
    private _uid: string,
    private _changed: () => void,
  ) {}

  begin(): void {
    this._end ??= this._cluster.subscribe({ topic: "metrics", mesh: this._uid }, (message) => this._take(message));
  }

  end(): void {
    this._end?.();
  }

  private _take({ reset, points }: MetricMessage): void {
    if (reset) this.values.clear();
    for (const [name, rows] of Object.entries(points)) {
      const latest = this.values.get(name) ?? new Map<number, number>();
      this.values.set(name, latest);
      for (const [index, , , value] of rows) latest.set(index, value);
    }
    this._changed();
  }

  private _end: (() => void) | null = null;
}

/** The colourings that a mesh has now. */
export function coloursOf(ranks: RankRecords, metrics: Pick<LatestMetrics, "values">): Record<string, Colour> {
  const looked = Object.values(ranks).slice(0, LOOKED);
  const used = Object.entries(USES).filter(([, colour]) => looked.some((rank) => colour.of(rank, -1) !== undefined));
  const measured = [...metrics.values].map(([name, values]): [string, Colour] => [
    METRIC + name,
    { name, of: (_, index) => values.get(index), show: number, ranged: true },
  ]);
  return Object.fromEntries([...used, ...measured]);
}

/** The lowest and highest displayed value, which span the colours. */
export function rangeOf(colour: Colour, values: Iterable<number | undefined>): [low: number, high: number] {
  let [low, high] = [colour.ranged ? Infinity : 0, colour.top ?? (colour.ranged ? -Infinity : 0)];
  for (const value of values) {
    if (value === undefined || !Number.isFinite(value)) continue;
    if (colour.ranged) low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low > high ? [0, 1] : [low, high];
}
