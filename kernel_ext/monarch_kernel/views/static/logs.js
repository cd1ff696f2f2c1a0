// The log view: what the ranks write, merged or in lanes, filtered, followed, kept.

import { pointOf } from "./cluster.js";
import { clock, h, placeOf, plural, say } from "./words.js";

const KEPT = 5000;
const LEVELS = ["", "debug", "info", "warning", "error"];
const LANES = 8;

/** Ranks in words, "0, 4-7" or "hosts=1 gpus=0:4", as indices; null for all of them, undefined where it means nothing. */
export function ranksOf(text, labels, sizes) {
  if (!text.trim()) return null;
  const count = sizes.reduce((product, size) => product * size, 1);
  if (text.includes("=")) {
    const picks = labels.map(() => null);
    for (const part of text.trim().split(/[\s,]+/)) {
      const match = /^(\w+)=(\d*)(?:(:)(\d*))?$/.exec(part);
      const d = match ? labels.indexOf(match[1]) : -1;
      if (d < 0 || (!match[2] && !match[3])) return undefined;
      const from = Number(match[2] || 0);
      picks[d] = [from, match[3] ? Number(match[4] || sizes[d]) : from + 1];
    }
    const found = [];
    for (let index = 0; index < count; index++)
      if (pointOf(sizes, index).every((at, d) => !picks[d] || (at >= picks[d][0] && at < picks[d][1]))) found.push(index);
    return found;
  }
  const found = new Set();
  for (const part of text.split(",")) {
    const match = /^\s*(\d+)\s*(?:[-–:]\s*(\d+))?\s*$/.exec(part);
    if (!match) return undefined;
    for (let index = Number(match[1]); index <= Math.min(count - 1, Number(match[2] ?? match[1])); index++) found.add(index);
  }
  return [...found];
}

/** Shows the lines of a mesh. `options`: {mesh, ranks?, text?, level?}. */
export function logView(cluster, root, options) {
  const uid = options.mesh;
  let mesh = cluster.state.meshes[uid];
  let lines = [], lanes = false, paused = false, held = [], end = null, skipped = 0, pending = null, built = false;
  const facts = h("span", { class: "mnb-dim" });
  const title = h("b");
  const text = h("input", { class: "mnb-pick mnb-find", type: "search", placeholder: "filter text", "aria-label": "filter text", value: options.text ?? "" });
  const level = h("select", { class: "mnb-pick", "aria-label": "level" }, ...LEVELS.map((name) => h("option", { value: name, text: name || "all levels" })));
  const where = h("input", { class: "mnb-pick mnb-where", placeholder: "ranks: 0-3, gpus=1", "aria-label": "ranks" });
  const mode = h("button", { class: "mnb-b", type: "button", "aria-pressed": "false", text: "Lanes" });
  const pause = h("button", { class: "mnb-b", type: "button", text: "Pause" });
  const save = h("button", { class: "mnb-b", type: "button", text: "Download" });
  const field = h("div", { class: "mnb-log", role: "log", tabindex: "0", "aria-label": "lines" });
  const down = h("button", { class: "mnb-b mnb-down", type: "button", text: "newest ↓", hidden: true });
  level.value = options.level ?? "";
  root.append(h("div", { class: "mnb-top mnb-wrap" }, h("span", {}, title, " ", facts), h("span", { class: "mnb-tools" }, where, text, level, mode, pause, save)), h("div", { class: "mnb-logs" }, field, down));

  let typing = 0;
  const later = () => {
    clearTimeout(typing);
    typing = setTimeout(follow, 250);
  };
  text.addEventListener("input", later);
  where.addEventListener("input", later);
  level.addEventListener("change", follow);
  mode.addEventListener("click", () => {
    lanes = !lanes;
    mode.setAttribute("aria-pressed", String(lanes));
    rebuild();
  });
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Follow" : "Pause";
    if (!paused) {
      add(held);
      held = [];
      toEnd();
    }
  });
  save.addEventListener("click", () => {
    const content = lines.map(([index, at, kind, line]) => `${new Date(at * 1000).toISOString()} ${named(index)} ${kind ? `${kind} ` : ""}${line}`).join("\n");
    const link = h("a", { href: URL.createObjectURL(new Blob([content + "\n"], { type: "text/plain" })), download: `${mesh?.name ?? "mesh"}.log` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  down.addEventListener("click", toEnd);
  field.addEventListener("scroll", () => (down.hidden = atEnd()), { passive: true });

  const atEnd = () => field.scrollTop + field.clientHeight >= field.scrollHeight - 8;
  function toEnd() {
    field.scrollTop = field.scrollHeight;
  }
  const named = (index) => (mesh?.labels?.length ? placeOf(mesh.labels, pointOf(mesh.sizes, index)) : mesh?.name ?? "");

  function wanted() {
    const found = ranksOf(where.value, mesh?.labels ?? [], mesh?.sizes ?? []);
    where.classList.toggle("mnb-wrong", found === undefined);
    return found ?? options.ranks ?? null;
  }

  function follow() {
    end?.();
    end = cluster.subscribe({ topic: "logs", mesh: uid, ranks: wanted() ?? undefined, text: text.value || undefined, level: level.value || undefined, lines: 1000 }, (told) => {
      if (told.reset) {
        lines = [];
        held = [];
        skipped = 0;
      }
      skipped += told.skipped ?? 0;
      if (paused && !told.reset) held.push(...told.lines);
      else if (told.reset) {
        lines = told.lines.slice(-KEPT);
        rebuild();
      } else add(told.lines);
      if (paused) say(pause, `Follow (${held.length})`);
    });
  }

  function add(more) {
    lines.push(...more);
    const gone = Math.max(0, lines.length - KEPT);
    lines.splice(0, gone);
    const stay = !atEnd();
    if (lanes) drawLanes();
    else {
      const part = document.createDocumentFragment();
      for (const line of more.slice(-KEPT)) part.append(row(line));
      field.append(part);
      while (field.childElementCount > KEPT) field.firstElementChild.remove();
    }
    if (!stay) toEnd();
    else down.hidden = false;
    count();
  }

  function row([index, at, kind, line], bare) {
    return h("div", { class: "mnb-line", "data-level": kind || null, title: clock(at) }, bare ? null : h("span", { class: "mnb-who", style: `--hue:${(index * 47) % 360}`, text: named(index) }), h("span", { text: line }));
  }

  function rebuild() {
    field.classList.toggle("mnb-lanes", lanes);
    if (lanes) drawLanes();
    else field.replaceChildren(...lines.map((line) => row(line)));
    toEnd();
    count();
  }

  function drawLanes() {
    const by = new Map();
    for (const line of lines) {
      if (!by.has(line[0])) by.set(line[0], []);
      by.get(line[0]).push(line);
    }
    const found = [...by.entries()].sort((a, b) => a[0] - b[0]);
    field.replaceChildren(
      ...found.slice(0, LANES).map(([index, mine]) => {
        const lane = h("div", { class: "mnb-lane" }, h("div", { class: "mnb-lane-head", text: named(index) }), ...mine.slice(-300).map((line) => row(line, true)));
        return lane;
      }),
    );
    if (found.length > LANES) field.append(h("div", { class: "mnb-dim mnb-lane", text: `${found.length - LANES} more: pick ranks above` }));
    for (const lane of field.children) lane.scrollTop = lane.scrollHeight;
  }

  function count() {
    say(title, mesh?.name ?? "");
    const parts = [plural(lines.length, "line")];
    if (skipped) parts.push(`${skipped} not shown`);
    if (!cluster.live) parts.push(`as it was at ${clock(cluster.now())}`);
    say(facts, `· ${parts.join(" · ")}`);
  }

  function changed() {
    pending ??= requestAnimationFrame(() => {
      pending = null;
      mesh = cluster.state.meshes[uid] ?? mesh;
      if (mesh && !built && cluster.live) {
        built = true;
        follow();
      }
      count();
    });
  }

  if (options.lines) {
    lines = options.lines;
    rebuild();
  }
  count();
  const stop = cluster.watch((patch) => (patch === null || patch.meshes?.[uid] !== undefined) && changed());
  return () => {
    stop();
    end?.();
    clearTimeout(typing);
    if (pending !== null) cancelAnimationFrame(pending);
  };
}
