// What is selected in a mesh: how it is, what it wrote last, where it is, and what can be done with it.

import { actorsOn, baseOf, indexOfBase, pointOf, rankOf } from "./cluster.js";
import { actionBar, bytes, copyButton, duration, h, placeOf, plural, say, STATES } from "./words.js";

const LINES = 200; // that are kept
const STACKS = 16; // ranks of which stacks are asked for at once

/** What a rank does, in words. */
export function words(mesh, rank) {
  const state = mesh.stopped ? "stopped" : rank.state;
  if (state === "busy") return `busy with ${rank.endpoint}`;
  return state + (rank.detail && state === "failed" ? `: ${rank.detail}` : "");
}

/** What it uses, in words; "" if nothing is known. */
export function usage(rank) {
  const parts = [];
  if (rank.pid) parts.push(`pid ${rank.pid}`);
  if (rank.cpu !== undefined) parts.push(`CPU ${Math.round(rank.cpu * 100)} %`);
  if (rank.memory) parts.push(bytes(rank.memory));
  if (rank.gpu_memory) parts.push(`GPU ${bytes(rank.gpu_memory)} of ${bytes(rank.gpu_total)}`);
  if (rank.queue) parts.push(`${rank.queue} waiting`);
  if (rank.rate) parts.push(`${rank.rate} calls/s`);
  if (rank.errors) parts.push(plural(rank.errors, "error"));
  return parts.join(" · ");
}

/** The facts about one rank: [what, value] each. `index` is that of the whole mesh. */
export function factsOf(cluster, uid, mesh, index) {
  const { state } = cluster;
  const rank = rankOf(state, uid, index);
  const lasts = rank.since && rank.state !== "idle" ? duration(cluster.now() - rank.since) : "";
  const since = lasts ? (rank.state === "failed" ? `, ${lasts} ago` : `, ${lasts}`) : "";
  const rows = [["state", words(mesh, rank) + since]];
  const base = baseOf(mesh, index);
  const under = mesh.kind === "procs" ? uid : mesh.on;
  const procs = state.meshes[under];
  if (procs?.hosts) {
    const host = procs.hosts[Math.floor(base / procs.per_host)];
    rows.push(["host", state.hosts[host]?.name ?? host]);
    const used = usage(rankOf(state, under, indexOfBase(procs, base)));
    if (used) rows.push(["process", used]);
  }
  if (mesh.kind === "actors" && usage(rank)) rows.push(["actor", usage(rank)]);
  if (rank.life) rows.push(["healed", rank.life === 1 ? "once" : `${rank.life} times`]);
  for (const [other, actors, at] of mesh.kind === "procs" ? actorsOn(state, uid, base) : []) {
    const actor = rankOf(state, other, at);
    const waiting = actor.queue ? ` · ${actor.queue} waiting` : "";
    rows.push([actors.name, `${actors.class} · ${words(actors, { ...actor, detail: "" })}${waiting}`]);
  }
  for (const one of Object.values(state.sessions))
    if (one.mesh === uid && one.rank === index) rows.push(["stopped at", `${one.file}:${one.line} in ${one.function}`]);
  const failure = state.failures[rank.failure];
  if (failure) rows.push(["next", failure.next]);
  return rows;
}

/** The facts about several. */
function factsOfMany(cluster, uid, indices) {
  const counts = {};
  for (const index of indices) {
    const { state } = rankOf(cluster.state, uid, index);
    counts[state] = (counts[state] ?? 0) + 1;
  }
  return [["state", STATES.filter((state) => counts[state]).map((state) => `${counts[state]} ${state}`).join(", ")]];
}

/** The panel of a selection; `indices` are those of the whole mesh. It has element, draw() and end(). */
export function details(cluster, uid, indices, { title, expression, close }) {
  const meshNow = () => cluster.state.meshes[uid];
  const wanted = { mesh: uid, ranks: indices };
  const facts = h("div", { class: "mnb-facts" });
  const output = h("pre", { class: "mnb-lines", tabindex: "0", "aria-label": "last lines", text: "nothing has been written yet" });
  output.hidden = indices.length > 1;
  const { message, tell, ask } = actionBar();
  let endLines = null;

  const heal = ask("Heal", () => cluster.request("heal", wanted), { class: "mnb-b mnb-main" });
  const interrupt = ask("Interrupt", () => cluster.request("interrupt", wanted));
  const stop = h("button", { class: "mnb-b", type: "button", text: "Stop" });
  let armed = 0;
  stop.addEventListener("click", async () => {
    if (!armed) {
      stop.textContent = "Stop for good?";
      armed = setTimeout(() => ((armed = 0), (stop.textContent = "Stop")), 3000);
      return;
    }
    clearTimeout(armed);
    armed = 0;
    stop.textContent = "Stop";
    try {
      tell((await cluster.request("stop", wanted)).text);
    } catch (error) {
      tell(error.message, true);
    }
  });
  const stack = ask("Stack", async () => {
    const mesh = meshNow();
    const { stacks } = await cluster.request("stack", { ...wanted, ranks: indices.slice(0, STACKS) });
    endLines?.(); // the box shows stacks from now on
    endLines = null;
    const head = (index) => (indices.length > 1 ? `── ${placeOf(mesh.labels, pointOf(mesh.sizes, Number(index)))}\n` : "");
    output.textContent = Object.entries(stacks).map(([index, text]) => head(index) + text).join("\n");
    output.hidden = false;
    output.scrollTop = 0;
    return null;
  }, { title: "where its Python code is right now" });

  const element = h(
    "div",
    { class: "mnb-details", "aria-live": "off" },
    h("div", { class: "mnb-top" }, h("b", { text: title }), h("button", { class: "mnb-b mnb-quiet", type: "button", text: "×", "aria-label": "close", onclick: close })),
    facts,
    h("div", { class: "mnb-buttons" }, heal, stack, interrupt, stop),
    output,
    expression ? h("div", { class: "mnb-slice" }, h("code", { text: expression }), copyButton("copy", () => expression)) : null,
    message,
  );

  if (indices.length === 1) {
    const kept = [];
    endLines = cluster.subscribe({ topic: "logs", ...wanted, lines: 60 }, (told) => {
      if (told.reset) kept.length = 0;
      for (const [, , , text] of told.lines) kept.push(text);
      kept.splice(0, Math.max(0, kept.length - LINES));
      const down = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
      output.textContent = kept.join("\n") || "nothing has been written yet";
      if (down) output.scrollTop = output.scrollHeight;
    });
  }

  return {
    element,
    draw() {
      const mesh = meshNow();
      if (!mesh) return;
      const broken = indices.filter((index) => rankOf(cluster.state, uid, index).state === "failed").length;
      const over = !cluster.live || Boolean(mesh.stopped);
      heal.hidden = !broken || over;
      stack.hidden = interrupt.hidden = broken === indices.length || over;
      stop.hidden = over;
      const rows = indices.length === 1 ? factsOf(cluster, uid, mesh, indices[0]) : factsOfMany(cluster, uid, indices);
      const old = facts.children;
      rows.forEach(([what, value], at) => {
        const row = old[at] ?? facts.appendChild(h("div", {}, h("span", { class: "mnb-dim" }), h("span")));
        say(row.children[0], what);
        say(row.children[1], value);
      });
      while (old.length > rows.length) old[rows.length].remove();
    },
    end() {
      endLines?.();
      clearTimeout(armed);
    },
  };
}
