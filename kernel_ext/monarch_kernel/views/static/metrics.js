// The metrics view: what actors tell with monarch.telemetry.log, and what their processes use, as live curves.

import { Chart } from "./chart.js";
import { clock, h, placeOf, plural, say } from "./words.js";
import { pointOf } from "./cluster.js";

const MOST = 4000; // points of a line
const HISTORY_S = 600;
const SINGLE = 8; // ranks with a line each; more are shown as their mean with a band
const USES = [
  ["cpu", "CPU, cores", (rank) => rank.cpu],
  ["memory", "memory, MB", (rank) => rank.memory && rank.memory / (1 << 20)],
  ["rate", "calls/s", (rank) => rank.rate],
];

/** Shows the metrics of a mesh. `options`: {mesh, points?}: what was told before it was saved. */
export function metricView(cluster, root, options) {
  const uid = options.mesh;
  let mesh = cluster.state.meshes[uid];
  let end = null, pending = null, chosen = null; // whether means are shown, once somebody has said so
  const data = new Map(); // name -> index -> [[step, value]]
  const charts = new Map();
  const title = h("b");
  const facts = h("span", { class: "mnb-dim" });
  const mean = h("button", { class: "mnb-b", type: "button", "aria-pressed": "false", text: "Mean" });
  const field = h("div", { class: "mnb-charts" });
  root.append(h("div", { class: "mnb-top" }, h("span", {}, title, " ", facts), h("span", { class: "mnb-tools" }, mean)), field);
  mean.addEventListener("click", () => {
    chosen = mean.getAttribute("aria-pressed") !== "true";
    soon();
  });

  function add(points) {
    for (const [name, rows] of Object.entries(points)) {
      if (!data.has(name)) data.set(name, new Map());
      const lines = data.get(name);
      for (const [index, step, , value] of rows) {
        if (!lines.has(index)) lines.set(index, []);
        const line = lines.get(index);
        line.push([step, value]);
        if (line.length > MOST) lines.set(index, line.filter((_, at) => at % 2 || at > MOST / 2));
      }
    }
    soon();
  }

  const soon = () => (pending ??= requestAnimationFrame(draw));

  function draw() {
    pending = null;
    mesh = cluster.state.meshes[uid] ?? mesh;
    say(title, mesh?.name ?? "");
    const ranks = new Set([...data.values()].flatMap((lines) => [...lines.keys()]));
    const when = cluster.live ? "" : ` · as it was at ${clock(cluster.now())}`;
    say(facts, data.size ? `· ${plural(ranks.size, "rank")}${when}` : `· no metrics yet: call monarch.telemetry.log(loss=…, step=…) in an actor${when}`);
    mean.hidden = ranks.size < 2;
    mean.setAttribute("aria-pressed", String(chosen ?? ranks.size > SINGLE));
    for (const [name, lines] of data) {
      let chart = charts.get(name);
      if (!chart) {
        chart = new Chart(name, USED.has(name) ? "s ago" : "step");
        charts.set(name, chart);
        field.append(chart.element);
      }
      chart.mean = mean.getAttribute("aria-pressed") === "true";
      chart.lines = [...lines.entries()].sort((a, b) => a[0] - b[0]).map(([index, points]) => ({ label: mesh?.labels?.length ? placeOf(mesh.labels, pointOf(mesh.sizes, index)) : "", points }));
      chart.draw();
    }
  }

  // What processes use is in the state; its history is kept here, from when the view was opened.
  const USED = new Set(USES.map(([, name]) => name));
  const begun = Date.now() / 1000;
  function sample() {
    const known = cluster.state.ranks[uid];
    if (!known || !cluster.live || mesh?.stopped) return;
    const now = Date.now() / 1000;
    for (const [, name, of] of USES) {
      for (const index in known) {
        const value = of(known[index]);
        if (value === undefined || Number(index) >= 64) continue;
        if (!data.has(name)) data.set(name, new Map());
        const lines = data.get(name);
        const at = Number(index);
        if (!lines.has(at)) lines.set(at, []);
        const line = lines.get(at);
        line.push([Math.round(now - begun), value]);
        while (line.length > HISTORY_S / 2) line.shift();
      }
      const chart = charts.get(name);
      if (chart) chart.xName = "s";
    }
    if (root.isConnected) soon();
  }

  if (options.points) add(options.points);
  draw();
  const stop = cluster.watch((patch) => {
    if (patch !== null) return;
    if (cluster.live && !end)
      end = cluster.subscribe({ topic: "metrics", mesh: uid }, (told) => {
        if (told.reset) for (const name of [...data.keys()]) if (!USED.has(name)) data.delete(name);
        add(told.points);
      });
    soon();
  });
  const sampling = options.usage === false ? 0 : setInterval(sample, 2000);
  const sized = new ResizeObserver(soon);
  sized.observe(field);
  return () => {
    stop();
    end?.();
    clearInterval(sampling);
    sized.disconnect();
    if (pending !== null) cancelAnimationFrame(pending);
  };
}
