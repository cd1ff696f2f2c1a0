// Many ranks by their hosts: what each host's ranks are, together.

import { rankOf } from "./cluster.js";
import { STATES } from "./words.js";

/** Where the ranks of a view lie: {hosts, of(index), on(host), sizes, labels}; null where hosts tell nothing. */
export function hostsOf(state, mesh, labels, sizes, baseAt) {
  const procs = mesh.kind === "procs" ? mesh : state.meshes[mesh.on];
  const names = procs?.hosts ?? [];
  if (names.length < 2) return null;
  const count = sizes.reduce((product, size) => product * size, 1);
  const members = new Map();
  const host = new Array(count);
  for (let index = 0; index < count; index++) {
    const at = Math.floor(baseAt(index) / procs.per_host);
    host[index] = at;
    if (!members.has(at)) members.set(at, []);
    members.get(at).push(index);
  }
  const found = [...members.keys()].sort((a, b) => a - b);
  if (found.length < 2 || found.length === count) return null;
  const place = new Map(found.map((at, i) => [at, i]));
  // Leading dimensions that run over whole hosts name them; the rest are the ranks within one.
  let split = 0;
  for (let product = 1; split < sizes.length && product < found.length; split++) product *= sizes[split];
  const plain = sizes.slice(0, split).reduce((product, size) => product * size, 1) === found.length && count % found.length === 0;
  return {
    names: found.map((at) => state.hosts[names[at]]?.name ?? names[at]),
    of: (index) => place.get(host[index]),
    on: (at) => members.get(found[at]),
    labels: plain ? labels.slice(0, split) : ["hosts"],
    sizes: plain ? sizes.slice(0, split) : [found.length],
    inner: plain ? { labels: labels.slice(split), sizes: sizes.slice(split) } : null,
  };
}

/** How a heap of ranks is: {state, parts: [[state, share]], counts}; the worst state stands for all of it. */
export function together(state, uid, indices) {
  const counts = {};
  for (const index of indices) {
    const one = rankOf(state, uid, index).state;
    counts[one] = (counts[one] ?? 0) + 1;
  }
  const there = STATES.filter((one) => counts[one]);
  const shares = there.map((one) => Math.max(counts[one], one === "failed" ? indices.length / 2 : 0)); // to be seen
  const sum = shares.reduce((total, share) => total + share, 0);
  return { state: there[0] ?? "stopped", parts: there.map((one, at) => [one, shares[at] / sum]), counts };
}
