// The results of actions as text: for displays in cells, and for the box below the facts in the panel.

import type { Cluster } from "../cluster/client";
import { countOf, pointOf } from "../cluster/ranks";
import type { Mesh } from "../cluster/state";
import { say } from "../page/language";
import { placeOf } from "../page/words";
import type { Part, Target } from "./table";

const STACKS = 16; // ranks per request of stacks
const LINES = 50; // of each rank
const WHERE = "where"; // a command of the debugger

/** Texts by the index of their rank; of several ranks each below its name. */
function byRank(mesh: Mesh, texts: Record<string, string>): string {
  const several = Object.keys(texts).length > 1;
  return Object.entries(texts)
    .map(([index, text]) => (several ? `── ${placeOf(mesh.labels, pointOf(mesh.sizes, Number(index)))}\n${text}` : text))
    .join("\n");
}

function ranksOf(mesh: Mesh, ranks: readonly number[] | null): number[] {
  return (ranks ?? Array.from({ length: Math.min(STACKS, countOf(mesh.sizes)) }, (_, index) => index)).slice(0, STACKS);
}

/** The stacks of the threads of some ranks. */
export async function stacksText(cluster: Cluster, uid: string, ranks: readonly number[] | null): Promise<string> {
  const mesh = cluster.state.meshes[uid];
  if (!mesh) return "";
  const { stacks } = await cluster.request("stack", { mesh: uid, ranks: ranksOf(mesh, ranks) });
  return byRank(mesh, stacks);
}

/** The content of a part of the panel, as text. */
export async function answerOf(cluster: Cluster, part: Part, { uid, mesh, ranks, place }: Target): Promise<string> {
  switch (part) {
    case "stacks":
      return stacksText(cluster, uid, ranks);
    case "findings": {
      const { findings, inspected, text } = await cluster.request("why", { mesh: uid });
      return [...findings.map((finding) => finding.text), text, say`inspected: ${inspected}`].filter(Boolean).join("\n");
    }
    case "logs": {
      const { lines } = await cluster.request("logs", { mesh: uid, ranks: ranksOf(mesh, ranks), lines: LINES });
      return byRank(mesh, Object.fromEntries(Object.entries(lines).map(([index, texts]) => [index, texts.join("\n") || say`no output yet`])));
    }
    case "timeline":
      await cluster.request("timeline", { do: "begin", mesh: uid, ...(ranks && { ranks }) });
      return say`a timeline of ${place} is recorded: ${"%timeline"} shows it`;
    case "debugger": {
      const stopped = Object.entries(cluster.state.sessions).filter(([, session]) => session.mesh === uid && (!ranks || ranks.includes(session.rank ?? -1)));
      const { text } = await cluster.request("debug", { do: "command", text: WHERE, sessions: stopped.map(([session]) => session) });
      return text ?? "";
    }
  }
}
