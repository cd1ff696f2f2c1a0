// The mesh view: a grid that lives, and what can be done with the ranks that are selected in it.

import { actorsOn, baseOf, indexOfBase, pointOf, rankOf, sliceExpression } from "./cluster.js";
import { Grid } from "./grid.js";
import { askButton, bytes, clock, copyButton, duration, h, placeOf, plural, say, shapeOf, STATES } from "./words.js";

const METRICS = {
  state: null,
  cpu: { name: "CPU", of: (rank) => rank.cpu, show: (value) => `${Math.round(value * 100)} %`, top: 1 },
  memory: { name: "memory", of: (rank) => rank.memory, show: bytes },
  gpu: { name: "GPU", of: (rank) => rank.gpu, show: (value) => `${Math.round(value * 100)} %`, top: 1 },
  gpu_memory: { name: "GPU memory", of: (rank) => rank.gpu_memory, show: bytes },
  queue: { name: "queue", of: (rank) => rank.queue, show: (value) => plural(value, "message") },
  rate: { name: "calls/s", of: (rank) => rank.rate, show: (value) => `${value} calls/s` },
  errors: { name: "errors", of: (rank) => rank.errors, show: (value) => plural(value, "error") },
};

/** Shows a mesh, or a slice of one. `options`: {mesh, labels?, sizes?, ranks?}. Gives a function that ends it. */
export function meshView(cluster, root, options) {
  const uid = options.mesh;
  let mesh = cluster.state.meshes[uid];
  let ranks = options.ranks ?? null; // indices in the whole mesh, for a slice
  let labels, sizes, grid, metric = "state", across, selection = [], pending = null, all = true, top = 1;
  const dirty = new Set();

  const title = h("b");
  const facts = h("span", { class: "mnb-dim" });
  const status = h("span", { class: "mnb-status mnb-dim", role: "status" });
  const legend = h("div", { class: "mnb-legend" });
  const field = h("div", { class: "mnb-field" });
  const details = h("div", { class: "mnb-details", hidden: true, "aria-live": "off" });
  const tip = h("div", { class: "mnb-tip", role: "tooltip", hidden: true });
  const message = h("div", { class: "mnb-message", role: "status" });
  const tell = (text, wrong) => {
    message.textContent = text;
    message.classList.toggle("mnb-wrong", Boolean(wrong));
  };
  const healAll = askButton("Heal", () => cluster.request("heal", { mesh: uid }), tell, { class: "mnb-b mnb-main" });
  const colour = h("select", { class: "mnb-pick", "aria-label": "colour by", onchange: () => setMetric(colour.value) });
  const turn = h("select", { class: "mnb-pick", "aria-label": "dimension across", onchange: () => build(Number(turn.value)) });
  const tools = h("span", { class: "mnb-tools" }, turn, colour, healAll);
  root.append(
    h("div", { class: "mnb-top" }, h("span", {}, title, " ", facts), status, tools),
    h("div", { class: "mnb-body" }, h("div", { class: "mnb-left-side" }, field, legend), details),
    message,
    tip,
  );

  const whole = (index) => (ranks ? ranks[index] : index);

  function build(now) {
    across = now;
    grid = new Grid(labels, sizes, across, look, { hover, select, pick: () => {} });
    field.replaceChildren(grid.element);
    root.classList.toggle("mnb-many", grid.size === "s");
    select([]);
    all = true;
    draw();
  }

  function start() {
    labels = options.labels ?? mesh.labels;
    sizes = options.sizes ?? mesh.sizes;
    turn.hidden = labels.length < 2;
    turn.replaceChildren(...labels.map((label, d) => h("option", { value: d, text: `${label} across` })));
    turn.value = String(labels.length - 1);
    build(Math.max(0, labels.length - 1));
  }

  function setMetric(name) {
    metric = name;
    all = true;
    draw();
  }

  function look(index) {
    const rank = rankOf(cluster.state, uid, whole(index));
    const point = pointOf(sizes, index);
    const state = mesh.stopped ? "stopped" : rank.state;
    let fill = null;
    const kind = METRICS[metric];
    if (kind) fill = Math.min(1, (kind.of(rank) ?? 0) / top);
    return { state, fill, text: String(point.at(-1) ?? 0), label: `${placeOf(labels, point) || "one"}, ${words(rank)}` };
  }

  function words(rank) {
    const state = mesh.stopped ? "stopped" : rank.state;
    if (state === "busy") return `busy with ${rank.endpoint}`;
    return state + (rank.detail && state === "failed" ? `: ${rank.detail}` : "");
  }

  function hover(index, box) {
    if (index < 0 || !box) {
      tip.hidden = true;
      return;
    }
    const rank = rankOf(cluster.state, uid, whole(index));
    const since = rank.since ? ` for ${duration(cluster.now() - rank.since)}` : "";
    const lines = [h("b", { text: placeOf(labels, pointOf(sizes, index)) || "one" }), h("div", { text: words(rank) + (rank.state === "busy" || rank.state === "unresponsive" ? since : "") })];
    const used = usage(rank);
    if (used) lines.push(h("div", { class: "mnb-dim", text: used }));
    tip.replaceChildren(...lines);
    tip.hidden = false;
    const frame = root.getBoundingClientRect();
    const left = Math.min(box.left - frame.left, frame.width - tip.offsetWidth - 4);
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${box.bottom - frame.top + 5}px`;
  }

  function usage(rank) {
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

  // -- what is selected ------------------------------------------------------------------------------------------------

  let endLines = null, facts1 = null;

  function select(indices) {
    selection = indices;
    endLines?.();
    endLines = facts1 = null;
    details.hidden = !indices.length;
    if (!indices.length) {
      details.replaceChildren();
      return;
    }
    const wanted = { mesh: uid, ranks: indices.map(whole) };
    const expression = sliceExpression(mesh.name, labels, sizes, indices);
    const heading = h("b", { text: indices.length === 1 ? placeOf(labels, pointOf(sizes, indices[0])) || mesh.name : plural(indices.length, "rank") });
    facts1 = h("div", { class: "mnb-facts" });
    const output = h("pre", { class: "mnb-lines", tabindex: "0", "aria-label": "last lines" });
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
    const heal = askButton("Heal", () => cluster.request("heal", wanted), tell, { "data-for": "failed" });
    const stack = askButton(
      "Stack",
      async () => {
        const found = (await cluster.request("stack", { ...wanted, ranks: wanted.ranks.slice(0, 16) })).stacks;
        endLines?.();
        endLines = null;
        output.textContent = Object.entries(found)
          .map(([index, text]) => (indices.length > 1 ? `── ${placeOf(mesh.labels, pointOf(mesh.sizes, Number(index)))}\n${text}` : text))
          .join("\n");
        output.scrollTop = 0;
        return null;
      },
      tell,
      { "data-for": "living" },
    );
    details.replaceChildren(
      h("div", { class: "mnb-top" }, heading, h("button", { class: "mnb-b mnb-quiet", type: "button", text: "×", "aria-label": "close", onclick: () => grid.select([]) })),
      facts1,
      h(
        "div",
        { class: "mnb-buttons" },
        stack,
        askButton("Interrupt", () => cluster.request("interrupt", wanted), tell, { "data-for": "living" }),
        heal,
        stop,
      ),
      output,
    );
    if (expression && mesh.labels.length)
      details.append(h("div", { class: "mnb-slice" }, h("code", { text: expression }), copyButton("copy", () => expression)));
    if (indices.length === 1) {
      const kept = [];
      endLines = cluster.subscribe({ topic: "logs", mesh: uid, ranks: wanted.ranks, lines: 60 }, (told) => {
        if (told.reset) kept.length = 0;
        for (const [, , , text] of told.lines) kept.push(text);
        kept.splice(0, Math.max(0, kept.length - 200));
        const down = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
        output.textContent = kept.join("\n") || "nothing written yet";
        if (down) output.scrollTop = output.scrollHeight;
      });
    } else output.hidden = true;
    drawDetails();
  }

  function drawDetails() {
    if (!facts1) return;
    const found = selection.map((index) => rankOf(cluster.state, uid, whole(index)));
    const broken = found.filter((rank) => rank.state === "failed").length;
    for (const button of details.querySelectorAll("[data-for]"))
      if (button.dataset.for === "failed") {
        button.hidden = !broken;
        button.classList.toggle("mnb-main", broken > 0);
      } else button.hidden = broken === found.length || !cluster.live || Boolean(mesh.stopped);
    const rows = [];
    if (found.length === 1) {
      const [rank] = found;
      const since = rank.since && rank.state !== "idle" ? `, ${duration(cluster.now() - rank.since)}` : "";
      rows.push(["state", words(rank) + since]);
      const base = baseOf(mesh, whole(selection[0]));
      const procs = mesh.kind === "procs" ? mesh : cluster.state.meshes[mesh.on];
      if (procs?.hosts) {
        const proc = rankOf(cluster.state, mesh.kind === "procs" ? uid : mesh.on, mesh.kind === "procs" ? whole(selection[0]) : indexOfBase(procs, base));
        const host = procs.hosts[Math.floor(base / procs.per_host)];
        rows.push(["host", cluster.state.hosts[host]?.name ?? host]);
        if (usage(proc)) rows.push(["process", usage(proc)]);
      }
      if (mesh.kind === "actors" && usage(rank)) rows.push(["actor", usage(rank)]);
      if (rank.life) rows.push(["healed", `${rank.life} time${rank.life > 1 ? "s" : ""}`]);
      for (const [other, actors, at] of mesh.kind === "procs" ? actorsOn(cluster.state, uid, base) : []) {
        const actor = rankOf(cluster.state, other, at);
        rows.push([actors.name, `${actors.class} · ${actor.state === "busy" ? `busy with ${actor.endpoint}` : actor.state}${actor.queue ? ` · ${actor.queue} waiting` : ""}`]);
      }
      const failure = cluster.state.failures[rank.failure];
      if (failure) rows.push(["next", failure.next]);
    } else {
      const counts = {};
      for (const rank of found) counts[rank.state] = (counts[rank.state] ?? 0) + 1;
      rows.push(["state", STATES.filter((state) => counts[state]).map((state) => `${counts[state]} ${state}`).join(", ")]);
    }
    const old = facts1.children;
    rows.forEach(([what, value], at) => {
      const row = old[at] ?? facts1.appendChild(h("div", {}, h("span", { class: "mnb-dim" }), h("span")));
      say(row.children[0], what);
      say(row.children[1], value);
    });
    while (old.length > rows.length) old[rows.length].remove();
  }

  // -- drawing ---------------------------------------------------------------------------------------------------------

  function draw() {
    pending = null;
    mesh = cluster.state.meshes[uid] ?? (mesh && { ...mesh, stopped: mesh.stopped ?? "it is gone" });
    if (!mesh) {
      say(facts, cluster.live ? "this mesh is gone" : "not connected to the kernel");
      tools.hidden = true;
      return;
    }
    if (!grid) {
      start();
      return;
    }
    const count = sizes.reduce((product, size) => product * size, 1);
    const many = mesh.kind === "procs" ? plural(count, "proc") : plural(count, mesh.class);
    const hosts = (mesh.kind === "procs" ? mesh : cluster.state.meshes[mesh.on])?.hosts ?? [];
    const where = hosts.length > 1 ? plural(hosts.length, "host") : "";
    say(title, mesh.name);
    say(facts, ["", many, labels.length ? shapeOf({ labels, sizes }) : "", where, mesh.stopped ? `stopped: ${mesh.stopped}` : ""].filter((part, at) => part || !at).join(" · "));
    say(status, cluster.live ? "" : `as it was at ${clock(cluster.now())}`);
    const known = availableMetrics();
    if (colour.dataset.known !== known.join()) {
      colour.dataset.known = known.join();
      colour.replaceChildren(...known.map((name) => h("option", { value: name, text: METRICS[name]?.name ?? "state" })));
      colour.value = metric = known.includes(metric) ? metric : "state";
    }
    colour.hidden = known.length < 2 || Boolean(mesh.stopped);
    const kind = METRICS[metric];
    if (kind) {
      let most = kind.top ?? 0;
      for (let index = 0; index < count; index++) most = Math.max(most, kind.of(rankOf(cluster.state, uid, whole(index))) ?? 0);
      if (most !== top) all = true;
      top = most || 1;
    }
    grid.update(all ? undefined : dirty);
    all = false;
    dirty.clear();
    drawLegend(count);
    drawDetails();
  }

  function availableMetrics() {
    const found = new Set();
    const known = cluster.state.ranks[uid] ?? {};
    let looked = 0;
    for (const index in known) {
      for (const name in METRICS) if (METRICS[name] && METRICS[name].of(known[index]) !== undefined) found.add(name);
      if (++looked > 64) break;
    }
    if (metric !== "state") found.add(metric);
    return Object.keys(METRICS).filter((name) => name === "state" || found.has(name));
  }

  function drawLegend(count) {
    let counts = mesh.counts;
    if (ranks) {
      counts = {};
      for (const index of ranks) {
        const { state } = rankOf(cluster.state, uid, index);
        counts[state] = (counts[state] ?? 0) + 1;
      }
    }
    const failed = counts.failed ?? 0;
    healAll.style.visibility = failed && !mesh.stopped && cluster.live ? "visible" : "hidden";
    const kind = METRICS[metric];
    const items = kind
      ? [["metric", `${kind.name}, up to ${kind.show(top)}`]]
      : STATES.filter((state) => counts[state]).map((state) => [state, `${counts[state]} ${state}`]);
    const old = legend.children;
    items.forEach(([state, text], at) => {
      const item = old[at] ?? legend.appendChild(h("span", {}, h("i", { class: "mnb-swatch" }), h("span")));
      if (item.children[0].dataset.state !== state) item.children[0].dataset.state = state;
      say(item.children[1], text);
    });
    while (old.length > items.length) old[items.length].remove();
    if (grid.canvas) grid.canvas.setAttribute("aria-label", `${count} ranks: ${items.map(([, text]) => text).join(", ")}`);
  }

  const inverse = ranks ? new Map(ranks.map((index, at) => [String(index), at])) : null;

  function changed(patch) {
    if (patch === null) all = true;
    else {
      const mine = patch.ranks?.[uid];
      if (mine)
        for (const index in mine) {
          const at = inverse ? inverse.get(index) : Number(index);
          if (at !== undefined) dirty.add(at);
        }
      const told = patch.meshes?.[uid];
      if (told === null || told?.state || told?.stopped) all = true;
      const near = selection.length && (patch.ranks || patch.meshes || patch.failures);
      if (!mine && told === undefined && !near && !patch.hosts) return;
    }
    pending ??= requestAnimationFrame(draw);
  }

  draw();
  const end = cluster.watch(changed);
  const ticking = setInterval(() => {
    if (selection.length && root.isConnected) drawDetails();
  }, 500);
  return () => {
    end();
    endLines?.();
    clearInterval(ticking);
    if (pending !== null) cancelAnimationFrame(pending);
  };
}
