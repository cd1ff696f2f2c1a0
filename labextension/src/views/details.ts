// The selection in a mesh: its state, its last lines, its stacks, and its actions.

import type { Cluster } from "../cluster/client";
import { actorsOn, baseOf, countsOf, hostOf, indexOfBase, present, procsOf, rankOf } from "../cluster/ranks";
import type { Mesh, Rank } from "../cluster/state";
import { copyButton } from "../page/buttons";
import { h, setFacts } from "../page/dom";
import { bytes, duration, memoryOf, plural } from "../page/words";
import { phrase, say } from "../page/language";
import type { InCell } from "../panel/incell";
import { ACTIONS } from "../panel/table";

const LINES = 200; // at most
const nothingWritten = (): string => say`no output yet`;

export type Fact = [what: string, value: string];

/** The activity of a rank, in words. */
export function words(mesh: Pick<Mesh, "stopped">, rank: Partial<Rank>): string {
  if (mesh.stopped) return "stopped";
  if (rank.state === "busy") return say`busy with ${rank.endpoint}`;
  return `${rank.state}${rank.detail && rank.state === "failed" ? `: ${rank.detail}` : ""}`;
}

/** Its resource use, in words; "" if unknown. */
export function usage(rank: Partial<Rank>): string {
  const parts: string[] = [];
  if (rank.pid) parts.push(`pid ${rank.pid}`);
  if (rank.cpu !== undefined) parts.push(`CPU ${Math.round(rank.cpu * 100)} %`);
  if (rank.memory) parts.push(memoryOf(rank));
  if (rank.gpu_memory) parts.push(say`GPU ${bytes(rank.gpu_memory)} of ${bytes(rank.gpu_total ?? 0)}`);
  if (rank.queue) parts.push(`${rank.queue} waiting`);
  if (rank.rate) parts.push(`${rank.rate} calls/s`);
  if (rank.errors) parts.push(plural(rank.errors, "error"));
  return parts.join(" · ");
}

/** The facts about one rank. `index` is that of the whole mesh. */
export function factsOf(cluster: Pick<Cluster, "state" | "now">, uid: string, mesh: Mesh, index: number): Fact[] {
  const { state } = cluster;
  const rank = rankOf(state, uid, index);
  const lasts = rank.since && rank.state !== "idle" ? duration(cluster.now() - rank.since) : "";
  const since = lasts ? (rank.state === "failed" ? `, ${lasts} ago` : `, ${lasts}`) : "";
  const facts: Fact[] = [["state", words(mesh, rank) + since]];
  const base = baseOf(mesh, index);
  const procs = procsOf(state, mesh);
  if (procs?.hosts) {
    facts.push([say`host`, hostOf(state, mesh, base)]);
    const used = usage(rankOf(state, mesh.kind === "procs" ? uid : (mesh.on ?? ""), indexOfBase(procs, base)));
    if (used) facts.push([say`process`, used]);
  }
  if (mesh.kind === "actors" && usage(rank)) facts.push([say`actor`, usage(rank)]);
  if (rank.incarnation) facts.push([say`healed`, rank.incarnation === 1 ? say`once` : plural(rank.incarnation, "time")]);
  for (const [actorsUid, actors, actorIndex] of mesh.kind === "procs" ? actorsOn(state, uid, base) : []) {
    const actor = rankOf(state, actorsUid, actorIndex);
    const waiting = actor.queue ? ` · ${actor.queue} waiting` : "";
    facts.push([actors.name, `${actors.class} · ${words(actors, { ...actor, detail: "" })}${waiting}`]);
  }
  for (const session of Object.values(state.sessions))
    if (session.mesh === uid && session.rank === index) facts.push([say`stopped at`, `${session.file}:${session.line} in ${session.function}`]);
  const next = state.failures[rank.failure ?? ""]?.next;
  if (next) facts.push([say`next`, next]);
  return facts;
}

function factsOfMany(cluster: Cluster, uid: string, indices: readonly number[]): Fact[] {
  const counts = present(countsOf(cluster.state, uid, indices));
  return [["state", counts.map(([state, count]) => `${count} ${state}`).join(", ")]];
}

export interface Details {
  element: HTMLElement;
  draw(): void;
  end(): void;
}

/** The panel of a selection; `indices` are those of the whole mesh, `ranks` the same, or null for all of it. */
export function details(cluster: Cluster, uid: string, indices: number[], acting: InCell, { title, expression, ranks, close }: { title: string; expression: string; ranks: number[] | null; close: () => void }): Details {
  const facts = h("div", { class: "mnb-facts" });
  const output = h("pre", { class: "mnb-lines", tabindex: "0", "aria-label": say`last lines`, text: nothingWritten() });
  output.hidden = indices.length > 1;
  const buttons = ACTIONS.filter((action) => action.button).map((action) => ({
    action,
    button: h("button", { class: action.name === "heal" ? "mnb-b mnb-main" : "mnb-b", type: "button", text: phrase(action.label), title: say`${phrase(action.hint)} (${action.key} at its cell)`, onclick: () => void acting.actions.act(action.name, uid, ranks) }),
  }));
  const more = acting.menuButton(say`More`, () => ({ uid, ranks }));

  const element = h(
    "div",
    { class: "mnb-details", "aria-live": "off" },
    h("div", { class: "mnb-top" }, h("b", { text: title }), h("button", { class: "mnb-b mnb-quiet", type: "button", text: "×", "aria-label": say`close`, onclick: close })),
    facts,
    h("div", { class: "mnb-buttons" }, ...buttons.map(({ button }) => button), more),
    output,
    expression ? h("div", { class: "mnb-slice" }, h("code", { text: expression }), copyButton(say`copy`, () => expression)) : null,
  );
  const end = indices.length === 1 ? showLines(cluster, { mesh: uid, ranks: indices }, output) : () => undefined;

  return {
    element,
    draw() {
      const mesh = cluster.state.meshes[uid];
      if (!mesh) return;
      const on = cluster.live ? acting.actions.target(uid, ranks) : null;
      for (const { action, button } of buttons) button.hidden = !on || !action.applies(on);
      more.hidden = !on;
      const [only] = indices;
      setFacts(facts, indices.length === 1 && only !== undefined ? factsOf(cluster, uid, mesh, only) : factsOfMany(cluster, uid, indices));
    },
    end,
  };
}

/** Writes the last lines of a rank into a box until the result is called; the box follows them while it is scrolled down. */
function showLines(cluster: Cluster, selection: { mesh: string; ranks: number[] }, output: HTMLElement): () => void {
  const tail: string[] = [];
  return cluster.subscribe({ topic: "logs", ...selection, lines: 60 }, ({ reset, lines }) => {
    if (reset) tail.length = 0;
    for (const [, , , text] of lines) tail.push(text);
    tail.splice(0, Math.max(0, tail.length - LINES));
    const down = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
    output.textContent = tail.join("\n") || nothingWritten();
    if (down) output.scrollTop = output.scrollHeight;
  });
}
