// The cluster in one line.

import { baseOf, indexOfBase, sizeOf } from "../cluster/ranks";
import type { ClusterState } from "../cluster/state";
import { plural, say } from "../page/language";
import { stateWord } from "../page/words";

export interface Summary {
  meshes: number;
  ranks: number;
  well: number;
  failed: number;
  /** `4 meshes · 63/64 ranks · 12 busy · 1 failed`; "no meshes" for none. */
  text: string;
}

const TROUBLE = ["failed", "unresponsive", "paused", "healing", "starting"] as const;
const AWAY = new Set(["failed", "unresponsive", "healing", "starting", "stopped"]);

/** Ranks are those of processes, each in the worst state of its actors. */
export function summaryOf(state: ClusterState): Summary {
  const counts: Record<string, number> = {};
  let meshes = 0;
  let ranks = 0;
  const living = Object.entries(state.meshes).filter(([, mesh]) => !mesh.stopped);
  for (const [uid, mesh] of living) {
    if (!mesh.inner) meshes++;
    if (mesh.kind === "actors" && mesh.on && state.meshes[mesh.on]) continue;
    const size = sizeOf(mesh);
    ranks += size;
    const ownCounts = { ...mesh.counts };
    const worse = failedActorsOn(state, uid, living);
    for (const index of worse) {
      const was = state.ranks[uid]?.[index]?.state ?? mesh.state;
      if (was === "failed") continue;
      ownCounts[was] = (ownCounts[was] ?? 0) - 1;
      ownCounts.failed = (ownCounts.failed ?? 0) + 1;
    }
    for (const [how, count] of Object.entries(ownCounts)) counts[how] = (counts[how] ?? 0) + (count ?? 0);
  }
  const away = Object.entries(counts).reduce((sum, [how, count]) => sum + (AWAY.has(how) ? count : 0), 0);
  const well = ranks - away;
  const failed = counts.failed ?? 0;
  const notable = (["busy", ...TROUBLE] as const).filter((how) => counts[how]).map((how) => `${counts[how]} ${stateWord(how)}`);
  const text = meshes ? [plural(meshes, "mesh", "meshes"), say`${well}/${ranks} ranks`, ...notable].join(" · ") : say`no meshes`;
  return { meshes, ranks, well, failed, text };
}

function failedActorsOn(state: ClusterState, uid: string, living: [string, ClusterState["meshes"][string]][]): Set<number> {
  const indices = new Set<number>();
  const procs = state.meshes[uid];
  if (!procs || procs.kind !== "procs") return indices;
  for (const [otherUid, mesh] of living) {
    if (mesh.on !== uid || !mesh.counts?.failed) continue;
    for (const [index, rank] of Object.entries(state.ranks[otherUid] ?? {})) {
      if ((rank.state ?? mesh.state) !== "failed") continue;
      const base = indexOfBase(procs, baseOf(mesh, Number(index)));
      if (base >= 0) indices.add(base);
    }
  }
  return indices;
}
