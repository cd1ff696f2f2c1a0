// The failure view: a time line, a list, and for each failure its whole story and what can be done about it.

import { actionBar, clock, copyButton, duration, endOf, h, plural, say, tellingOf } from "./words.js";
import { autopsy } from "./autopsy.js";
import { cellOf, runAgain } from "./front.js";

const PIDS = 16; // that are told one by one
const OPENED = ["exception", "init", "unhandled", "raised"]; // causes that leave frames to look into

/**
 * Shows failures: all, those of `options.mesh`, or one, `options.failure`; with `options.bar` folded, above an error.
 * `options.raised` is what an endpoint has raised, in the form of a failure: the cluster knows nothing of it.
 */
export function failureView(cluster, root, options) {
  const title = h("b", { text: "Failures" });
  const facts = h("span", { class: "mnb-dim" });
  const status = h("span", { class: "mnb-status mnb-dim", role: "status" });
  const top = h("div", { class: "mnb-top" }, h("span", {}, title, " ", facts), status);
  const line = h("div", { class: "mnb-timeline", role: "group", hidden: true });
  const list = h("div", { class: "mnb-failures", role: "list" });
  const items = new Map();
  let pending = null;
  root.append(top, line, list);
  const single = Boolean(options.failure || options.raised);
  top.hidden = single;

  function mine() {
    if (options.raised) return [["raised", options.raised]];
    const near = (one) => !options.mesh || one.mesh === options.mesh || cluster.state.meshes[one.mesh]?.on === options.mesh;
    return Object.entries(cluster.state.failures)
      .filter(([id, one]) => (options.failure ? id === options.failure : near(one)))
      .sort((a, b) => b[1].at - a[1].at);
  }

  function draw() {
    pending = null;
    const found = mine();
    const open = found.filter(([, one]) => one.state === "open").length;
    say(facts, found.length ? `· ${plural(found.length, "failure")}, ${open ? `${open} not healed` : "all healed or stopped"}` : "· none so far");
    say(status, cluster.live ? "" : `as it was at ${clock(cluster.now())}`);
    drawLine(found);
    for (const [id, item] of items)
      if (!found.some(([other]) => other === id)) {
        item.element.remove();
        items.delete(id);
      }
    found.forEach(([id, one], at) => {
      let item = items.get(id);
      if (!item) {
        const first = single ? !options.bar : at === 0 && !items.size;
        items.set(id, (item = entry(cluster, id, one, first, options)));
      }
      item.update(one);
      if (list.children[at] !== item.element) list.insertBefore(item.element, list.children[at] ?? null);
    });
  }

  function drawLine(found) {
    line.hidden = single || found.length < 2;
    if (line.hidden) return;
    const now = cluster.now();
    const span = Math.max(60, now - Math.min(...found.map(([, one]) => one.at))) * 1.03;
    line.setAttribute("aria-label", `time line, the last ${duration(span)}`);
    line.replaceChildren(
      h("span", { class: "mnb-dim", style: "left:0", text: clock(now - span) }),
      h("span", { class: "mnb-dim", style: "right:0", text: cluster.live ? "now" : clock(now) }),
      ...found.map(([id, one]) => {
        const [from, to] = [one.at, one.ended ?? now].map((at) => (100 * (at - (now - span))) / span);
        const style = `left:${from}%;width:max(7px,${to - from}%)`;
        const label = `${clock(one.at)} ${one.title}, ${endOf(one.state)}`;
        return h("button", { type: "button", class: "mnb-span", "data-end": one.state, title: label, "aria-label": label, style, onclick: () => items.get(id)?.open() });
      }),
    );
  }

  function changed(patch) {
    if (patch && !patch.failures && !patch.hosts) return;
    pending ??= requestAnimationFrame(draw);
  }

  draw();
  const end = cluster.watch(changed);
  const ticking = setInterval(() => !line.hidden && drawLine(mine()), 5000);
  return () => {
    end();
    clearInterval(ticking);
    if (pending !== null) cancelAnimationFrame(pending);
  };
}

/** One failure: a line with what can be done, and its story below. */
function entry(cluster, id, one, opened, options) {
  const mark = h("span", { class: "mnb-end" });
  const when = h("span", { class: "mnb-dim mnb-when" });
  const { message, tell, ask } = actionBar();
  const wanted = () => ({ mesh: one.mesh });
  const heal = ask("Heal", () => cluster.request("heal", wanted()), { class: "mnb-b mnb-main", title: "start what has failed again" });
  const retry = ask(
    "Retry",
    async () => {
      if (one.state === "open") await cluster.request("heal", wanted());
      await runAgain(retry);
      return { text: "" };
    },
    { title: "heal, and run this cell again" },
  );
  const look = h("button", { class: "mnb-b", type: "button", text: "Post-mortem", title: "look into the frames where it was raised" });
  const report = copyButton("Copy report", () => (one.report.startsWith(one.title) ? one.report : `${one.title}\n\n${one.report}`));
  const rows = h("div", { class: "mnb-facts" });
  const story = h("div", { class: "mnb-story", hidden: !opened }, rows);
  const written = h("div");
  story.append(written);
  const title = h("b");
  const toggle = h("button", { class: "mnb-toggle", type: "button", "aria-expanded": String(opened) }, title, mark);
  const show = (open) => {
    story.hidden = !open;
    toggle.setAttribute("aria-expanded", String(open));
  };
  toggle.addEventListener("click", () => show(story.hidden));
  let autopsied = null;
  look.addEventListener("click", () => {
    show(true);
    if (!autopsied) story.append((autopsied = autopsy(cluster, { mesh: one.mesh, ranks: one.ranks.slice(0, 1), call: one.call }, () => (autopsied = null))));
    autopsied.querySelector("input")?.focus();
  });
  let told = "";
  const write = () => {
    const parts = [one.traceback ?? "", ...tailsOf(one)];
    if (JSON.stringify(parts) === told) return;
    told = JSON.stringify(parts);
    written.replaceChildren(
      ...(one.traceback ? [h("pre", { class: "mnb-trace", tabindex: "0", text: one.traceback })] : []),
      ...tailsOf(one).map(([whose, lines], at) => h("details", { open: at === 0 }, h("summary", { class: "mnb-dim", text: whose }), h("pre", { class: "mnb-lines mnb-short", tabindex: "0", text: lines.join("\n") }))),
    );
  };
  const buttons = h("span", { class: "mnb-buttons" }, heal, retry, look, report);
  const element = h("div", { class: "mnb-failure", role: "listitem" }, h("div", { class: "mnb-fail-top" }, toggle, when, buttons), message, story);
  return {
    element,
    open() {
      show(true);
      element.scrollIntoView({ block: "nearest" });
      toggle.focus();
    },
    update(now) {
      one = now;
      if (element.dataset.end !== one.state) element.dataset.end = one.state;
      say(title, one.title);
      write();
      say(mark, endOf(one.state));
      say(when, `${clock(one.at)}${one.ended ? `, ${endOf(one.state)} after ${duration(one.ended - one.at)}` : ""}`);
      heal.hidden = one.state !== "open" || !cluster.live;
      retry.hidden = !options.bar || !cluster.live || one.state === "healing" || !cellOf(element);
      look.hidden = !OPENED.includes(one.cause) || one.kind !== "actors" || !one.ranks.length || !cluster.live;
      rows.replaceChildren(...storyOf(cluster, one).map(([what, value]) => h("div", {}, h("span", { class: "mnb-dim", text: what }), h("span", { text: value }))));
    },
  };
}

/** What is known of a failure, in words: [what, value] each. */
export function storyOf(cluster, one) {
  const each = one.processes ?? (one.host || one.pid ? [[one.host, one.pid ? [one.pid] : []]] : []);
  const place = each.map(([host, pids]) => [host && `host ${cluster.state.hosts[host]?.name ?? host}`, pids.length > 0 && pidsOf(pids)].filter(Boolean).join(", ")).join("; ");
  const late = (one.detected ?? one.at) - one.at;
  const detected = late >= 1 ? `, noticed ${duration(late)} later` : "";
  return [
    ["what", one.oom ? "the host killed it because it ran out of memory" : ""],
    ["where", place],
    ["since", `${clock(one.at)}${detected}`],
    ...(one.texts ?? []),
    ["reported", tellingsOf(one.told ?? []).join("; then ")],
    ["affects", (one.also ?? []).join(", ")],
    ["next", one.state === "open" ? one.next : ""],
  ].filter(([, value]) => value);
}

function pidsOf(pids) {
  const more = pids.length > PIDS ? ` and ${pids.length - PIDS} more` : "";
  return `${pids.length === 1 ? "pid" : "pids"} ${pids.slice(0, PIDS).join(", ")}${more}`;
}

/** What the ranks wrote last, equal lines once: [whose, lines] each. */
export function tailsOf(one) {
  if (one.lines) return one.lines.map(([where, lines]) => [`last lines of ${where}`, lines]);
  return one.last_lines ? [[one.ranks?.length > 1 ? "last lines of each" : "last lines", one.last_lines]] : [];
}

/** Who was told, in words; of several ranks a call may have raised some, before the others were shown. */
function tellingsOf(told) {
  const called = told.some(([who]) => who === "a call");
  return told.filter(([who]) => !(called && who === "<root>")).map(([who, how]) => tellingOf(who, how));
}
