// What ranks can be coloured by besides their state: what they use, and what their actors tell.

import { bytes, plural } from "./words.js";
import { number } from "./chart.js";

const percent = (value) => `${Math.round(value * 100)} %`;

export const METRICS = {
  cpu: { name: "CPU", of: (rank) => rank.cpu, show: percent, top: 1 },
  memory: { name: "memory", of: (rank) => rank.memory, show: bytes },
  gpu: { name: "GPU", of: (rank) => rank.gpu, show: percent, top: 1 },
  gpu_memory: { name: "GPU memory", of: (rank) => rank.gpu_memory, show: bytes },
  queue: { name: "queue", of: (rank) => rank.queue, show: (value) => plural(value, "message") },
  rate: { name: "calls/s", of: (rank) => rank.rate, show: (value) => `${value} calls/s` },
  errors: { name: "errors", of: (rank) => rank.errors, show: (value) => plural(value, "error") },
};

const LOOKED = 64; // ranks that are looked at for what there is

/** Keeps the newest value of each name that actors tell, while somebody wants them. */
export class Told {
  constructor(cluster, uid, changed) {
    this.values = new Map(); // name -> index -> value
    this._begin = () => {
      this._begin = () => {};
      this._end = cluster.subscribe({ topic: "metrics", mesh: uid }, (told) => {
        if (told.reset) this.values.clear();
        for (const [name, rows] of Object.entries(told.points)) {
          if (!this.values.has(name)) this.values.set(name, new Map());
          for (const [index, , , value] of rows) this.values.get(name).set(index, value);
        }
        changed();
      });
    };
  }

  begin() {
    this._begin();
  }

  end() {
    this._end?.();
  }
}

/** What a mesh can be coloured by now: {key: {name, of(rank, index), show, top?}}. */
export function coloursOf(known, told) {
  const found = {};
  let looked = 0;
  for (const index in known) {
    for (const key in METRICS) if (METRICS[key].of(known[index]) !== undefined) found[key] = METRICS[key];
    if (++looked > LOOKED) break;
  }
  const sorted = Object.fromEntries(Object.keys(METRICS).filter((key) => found[key]).map((key) => [key, found[key]]));
  for (const [name, values] of told.values) sorted[`told:${name}`] = { name, of: (_, index) => values.get(index), show: number, ranged: true };
  return sorted;
}

/** The lowest and highest of what is shown: all of it is coloured between these. */
export function rangeOf(kind, values) {
  let [low, high] = [kind.ranged ? Infinity : 0, kind.top ?? (kind.ranged ? -Infinity : 0)];
  for (const value of values)
    if (Number.isFinite(value)) {
      if (kind.ranged) low = Math.min(low, value);
      high = Math.max(high, value);
    }
  return low > high ? [0, 1] : [low, high];
}
