// The mesh view: a grid that lives, by hosts first where there are many ranks; what is selected has its details beside.

import { baseOf, pointOf, rankOf, sliceExpression } from "./cluster.js";
import { coloursOf, rangeOf, Told } from "./colours.js";
import { details, usage, words } from "./details.js";
import { CANVAS_FROM, Grid } from "./grid.js";
import { hostsOf, together } from "./hosts.js";
import { askButton, clock, duration, h, placeOf, plural, say, shapeOf, STATES } from "./words.js";

const HOSTS_FROM = 256; // ranks from which on they can be shown by their hosts

/** Shows a mesh, or a slice of one. `options`: {mesh, labels?, sizes?, ranks?}. Gives a function that ends it. */
export function meshView(cluster, root, options) {
  const uid = options.mesh;
  const ranks = options.ranks ?? null; // indices in the whole mesh, for a slice
  let mesh = cluster.state.meshes[uid];
  let labels, sizes, count, hosts, grid, inner, panel;
  let byHosts = false, opened = -1, across = [], metric = "state", range = [0, 1], colours = {};
  let selection = [], pending = null, all = true;
  const dirty = new Set(); // ranks
  const told = new Told(cluster, uid, () => metric.startsWith("told:") && ((all = true), soon()));

  const title = h("b");
  const facts = h("span", { class: "mnb-dim" });
  const status = h("span", { class: "mnb-status mnb-dim", role: "status" });
  const legend = h("div", { class: "mnb-legend" });
  const field = h("div", { class: "mnb-field" });
  const side = h("div", { class: "mnb-side", hidden: true });
  const tip = h("div", { class: "mnb-tip", role: "tooltip", hidden: true });
  const message = h("div", { class: "mnb-message", role: "status" });
  const tell = (text, wrong) => {
    message.textContent = text;
    message.classList.toggle("mnb-wrong", Boolean(wrong));
  };
  const healAll = askButton("Heal", () => cluster.request("heal", { mesh: uid }), tell, { class: "mnb-b mnb-main" });
  const turns = h("span", { class: "mnb-turns", role: "group", "aria-label": "dimensions: across or down" });
  const level = h("button", { class: "mnb-b", type: "button", "aria-pressed": "false", text: "Hosts", title: "sum the ranks up by host" });
  const colour = h("select", { class: "mnb-pick", "aria-label": "colour by" });
  const tools = h("span", { class: "mnb-tools" }, healAll, turns, level, colour);
  root.append(
    h("div", { class: "mnb-top mnb-wrap" }, h("span", {}, title, " ", facts), status, tools),
    h("div", { class: "mnb-body" }, h("div", { class: "mnb-left-side" }, field, legend), side),
    message,
    tip,
  );
  for (const begin of ["pointerdown", "focus"]) colour.addEventListener(begin, () => told.begin());
  colour.addEventListener("change", () => {
    metric = colour.value;
    all = true;
    draw();
  });
  level.addEventListener("click", () => {
    byHosts = !byHosts;
    opened = -1;
    build();
  });

  const whole = (index) => (ranks ? ranks[index] : index);
  const at = (index) => rankOf(cluster.state, uid, whole(index));

  // -- what is shown ---------------------------------------------------------------------------------------------------

  function start() {
    labels = options.labels ?? mesh.labels;
    sizes = options.sizes ?? mesh.sizes;
    count = sizes.reduce((product, size) => product * size, 1);
    hosts = count >= HOSTS_FROM ? hostsOf(cluster.state, mesh, labels, sizes, (index) => baseOf(mesh, whole(index))) : null;
    byHosts = Boolean(hosts) && count > CANVAS_FROM;
    across = [Math.max(0, labels.length - 1)];
    level.hidden = !hosts;
    build();
  }

  function build() {
    select([]);
    inner = null;
    tip.hidden = true;
    level.setAttribute("aria-pressed", String(byHosts));
    turns.hidden = byHosts || labels.length < 2;
    turns.replaceChildren(...labels.map((label, d) => turn(label, d)));
    grid = byHosts
      ? new Grid(hosts.labels, hosts.sizes, hosts.sizes.length - 1, lookAtHost, { hover: hoverHost, select: openHosts })
      : new Grid(labels, sizes, across, look, { hover: (index, box) => hover(index, box), select });
    field.replaceChildren(grid.element);
    root.classList.toggle("mnb-many", grid.size === "s" || byHosts);
    all = true;
    draw();
  }

  /** A button that moves a dimension from across to down, or back. */
  function turn(label, d) {
    const isAcross = across.includes(d);
    const button = h("button", { class: "mnb-b mnb-turn", type: "button", text: `${label} ${isAcross ? "→" : "↓"}`, "aria-pressed": String(isAcross), title: `${label} runs ${isAcross ? "across" : "down"}; click to turn it` });
    button.addEventListener("click", () => {
      const others = across.filter((one) => one !== d);
      const next = isAcross ? others : labels.length > 2 ? [...across, d] : [d];
      across = next.length ? next : [labels.findIndex((_, one) => one !== d)];
      build();
      turns.children[d].focus();
    });
    return button;
  }

  function look(index) {
    const rank = at(index);
    const state = mesh.stopped ? "stopped" : rank.state;
    const kind = colours[metric];
    const value = kind ? kind.of(rank, whole(index)) : undefined;
    const fill = kind ? share(value) : null;
    const point = pointOf(sizes, index);
    const said = kind && value !== undefined ? `, ${kind.name} ${kind.show(value)}` : "";
    return { state, fill, text: String(point.at(-1) ?? 0), label: `${placeOf(labels, point) || "one"}, ${words(mesh, rank)}${said}` };
  }

  const share = (value) => (Number.isFinite(value) ? Math.min(1, (value - range[0]) / (range[1] - range[0] || 1)) : 0);

  function lookAtHost(host) {
    const indices = hosts.on(host);
    const kind = colours[metric];
    const { state, parts, counts } = together(cluster.state, uid, indices.map(whole));
    let fill = null;
    if (kind) {
      const values = indices.map((index) => kind.of(at(index), whole(index))).filter(Number.isFinite);
      fill = values.length ? share(values.reduce((sum, value) => sum + value, 0) / values.length) : 0;
    }
    const said = STATES.filter((one) => counts[one]).map((one) => `${counts[one]} ${one}`).join(", ");
    return { state: mesh.stopped ? "stopped" : state, fill, parts: mesh.stopped ? undefined : parts, text: "", label: `${hosts.names[host]}: ${said}` };
  }

  function openHosts(chosen) {
    opened = chosen.length === 1 ? chosen[0] : -1;
    inner = null;
    field.querySelector(".mnb-inner")?.remove();
    if (opened >= 0) {
      const indices = hosts.on(opened);
      const form = hosts.inner ?? { labels: ["rank"], sizes: [indices.length] };
      const own = { hover: (i, box) => hover(i < 0 ? -1 : indices[i], box), select: (them) => select(them.length ? them.map((i) => indices[i]) : indices) };
      inner = new Grid(form.labels, form.sizes, form.sizes.length - 1, (i) => look(indices[i]), own);
      inner.update();
      field.append(h("div", { class: "mnb-inner" }, h("div", { class: "mnb-dim", text: hosts.names[opened] }), inner.element));
    }
    select(chosen.flatMap((host) => hosts.on(host)));
  }

  // -- under the pointer, and selected ---------------------------------------------------------------------------------

  function hover(index, box) {
    if (index < 0 || !box) return point(null);
    const rank = at(index);
    const lasts = rank.since && ["busy", "unresponsive", "paused", "failed"].includes(rank.state) ? ` · ${duration(cluster.now() - rank.since)}` : "";
    const lines = [h("b", { text: placeOf(labels, pointOf(sizes, index)) || "one" }), h("div", { text: words(mesh, rank) + lasts })];
    const kind = colours[metric];
    const value = kind?.of(rank, whole(index));
    if (metric.startsWith("told:") && value !== undefined) lines.push(h("div", { text: `${kind.name} ${kind.show(value)}` }));
    const used = usage(rank);
    if (used) lines.push(h("div", { class: "mnb-dim", text: used }));
    point(lines, box);
  }

  function hoverHost(host, box) {
    if (host < 0 || !box) return point(null);
    const [name, said] = lookAtHost(host).label.split(": ");
    point([h("b", { text: name }), h("div", { text: said })], box);
  }

  function point(lines, box) {
    tip.hidden = !lines;
    if (!lines) return;
    tip.replaceChildren(...lines);
    const frame = root.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(box.left - frame.left, frame.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${box.bottom - frame.top + 5}px`;
  }

  function select(indices) {
    selection = indices;
    panel?.end();
    panel = null;
    side.hidden = !indices.length;
    side.replaceChildren();
    if (!indices.length) return;
    panel = details(cluster, uid, indices.map(whole), {
      title: indices.length === 1 ? placeOf(labels, pointOf(sizes, indices[0])) || mesh.name : plural(indices.length, "rank"),
      expression: labels.length ? sliceExpression(mesh.name, labels, sizes, indices) : "",
      close: () => grid.select([]),
    });
    side.append(panel.element);
    panel.draw();
  }

  // -- drawing ---------------------------------------------------------------------------------------------------------

  const soon = () => (pending ??= requestAnimationFrame(draw));

  function draw() {
    pending = null;
    mesh = cluster.state.meshes[uid] ?? (mesh && { ...mesh, stopped: mesh.stopped ?? "it is gone" });
    if (!mesh) {
      say(facts, cluster.live ? "this mesh is gone" : "not connected to the kernel");
      tools.hidden = true;
      return;
    }
    tools.hidden = false;
    if (!grid) return start();
    head();
    const kind = colours[metric];
    if (kind) {
      const values = Array.from({ length: count }, (_, index) => kind.of(at(index), whole(index)));
      const before = range;
      range = rangeOf(kind, values);
      if (String(before) !== String(range)) all = true;
    }
    if (all) {
      grid.update();
      inner?.update();
    } else if (byHosts) {
      grid.update(new Set([...dirty].map(hosts.of)));
      if (opened >= 0) inner.update(hosts.on(opened).flatMap((index, i) => (dirty.has(index) ? [i] : [])));
    } else grid.update(dirty);
    all = false;
    dirty.clear();
    drawLegend(kind);
    panel?.draw();
  }

  function head() {
    const many = plural(count, mesh.kind === "procs" ? "proc" : mesh.class);
    const on = (mesh.kind === "procs" ? mesh : cluster.state.meshes[mesh.on])?.hosts ?? [];
    const parts = [many, labels.length ? shapeOf({ labels, sizes }) : "", on.length > 1 ? plural(on.length, "host") : "", mesh.stopped ? `stopped: ${mesh.stopped}` : ""];
    say(title, mesh.name);
    say(facts, `· ${parts.filter(Boolean).join(" · ")}`);
    say(status, cluster.live ? "" : `as it was at ${clock(cluster.now())}`);
    colours = coloursOf(cluster.state.ranks[uid] ?? {}, told);
    if (metric !== "state" && !colours[metric]) metric = "state";
    const known = ["state", ...Object.keys(colours)].join();
    if (colour.dataset.known !== known) {
      colour.dataset.known = known;
      colour.replaceChildren(h("option", { value: "state", text: "state" }), ...Object.entries(colours).map(([key, kind]) => h("option", { value: key, text: kind.name })));
      colour.value = metric;
    }
    colour.hidden = Boolean(mesh.stopped) || !cluster.live;
  }

  function drawLegend(kind) {
    let { counts } = mesh;
    if (ranks) ({ counts } = together(cluster.state, uid, ranks));
    healAll.hidden = !counts.failed || Boolean(mesh.stopped) || !cluster.live;
    const items = kind
      ? [["metric", `${kind.name}, ${kind.show(range[0])} to ${kind.show(range[1])}`]]
      : STATES.filter((state) => counts[state]).map((state) => [state, `${counts[state]} ${state}`]);
    const old = legend.children;
    items.forEach(([state, text], i) => {
      const item = old[i] ?? legend.appendChild(h("span", {}, h("i", { class: "mnb-swatch" }), h("span")));
      if (item.children[0].dataset.state !== state) item.children[0].dataset.state = state;
      say(item.children[1], text);
    });
    while (old.length > items.length) old[items.length].remove();
    grid.canvas?.setAttribute("aria-label", `${count} ranks: ${items.map(([, text]) => text).join(", ")}`);
  }

  const inverse = ranks ? new Map(ranks.map((index, i) => [String(index), i])) : null;

  function changed(patch) {
    if (patch === null) all = true;
    else {
      const mine = patch.ranks?.[uid];
      for (const index in mine ?? {}) {
        const i = inverse ? inverse.get(index) : Number(index);
        if (i !== undefined) dirty.add(i);
      }
      const of = patch.meshes?.[uid];
      if (of === null || of?.state || of?.stopped) all = true;
      const near = selection.length && (patch.ranks || patch.meshes || patch.failures || patch.sessions);
      if (!mine && of === undefined && !near && !patch.hosts) return;
    }
    soon();
  }

  draw();
  const end = cluster.watch(changed);
  const ticking = setInterval(() => root.isConnected && panel?.draw(), 500);
  return () => {
    end();
    told.end();
    panel?.end();
    clearInterval(ticking);
    if (pending !== null) cancelAnimationFrame(pending);
  };
}
