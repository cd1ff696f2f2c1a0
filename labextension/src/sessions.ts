// Stopped ranks, gathered by where they stand.

import { duration, placeOf, plural, pointOf } from "./faces";
import { ClusterState, Session } from "./state";

export interface Group {
  ids: string[];
  title: string;
  where: string;
  place: string;
}

/** One entry for all ranks that stand at the same place, with the same stack. */
export function groupsOf(state: ClusterState, now: number): Group[] {
  const found = new Map<string, [string, Session][]>();
  for (const [id, session] of Object.entries(state.sessions)) {
    const key = session.group ?? id;
    const same = found.get(key);
    if (same) same.push([id, session]);
    else found.set(key, [[id, session]]);
  }
  return [...found.values()].map((same) => {
    const [, first] = same[0] as [string, Session];
    const mesh = state.meshes[first.mesh ?? ""];
    const ranks = same.map(([, session]) => session.rank ?? 0).sort((a, b) => a - b);
    const one = ranks.length === 1 && mesh ? placeOf(mesh.labels, pointOf(mesh.sizes, ranks[0] as number)) : "";
    const since = Math.min(...same.map(([, session]) => session.since ?? now));
    return {
      ids: same.map(([id]) => id),
      title: first.actor ?? mesh?.name ?? "",
      where: `${one || plural(ranks.length, "rank")} · ${duration(Math.floor(now - since))}`,
      place: `${first.function ?? "?"}, ${(first.file ?? "").split("/").pop()}:${first.line ?? "?"}`,
    };
  });
}
