// The failure view: a time line, a list, and for each failure its whole story and what can be done about it.

import { askButton, clock, copyButton, duration, h, plural, say } from "./words.js";

const ENDS = { open: "open", healing: "healing", healed: "healed", stopped: "stopped" };

/** Who was told, in words. */
function tellingOf(who, how) {
  if (who === "<root>") return how === "shown" ? "shown in the notebook" : `the notebook, ${how}`;
  return who === "a call" ? "raised by the call that waited" : `${who}, ${how}`;
}

/** Shows failures: all, or those of a mesh with `options.mesh`, or one with `options.failure`. */
export function failureView(cluster, root, options) {
  const title = h("b", { text: options.failure ? "" : "Failures" });
  const facts = h("span", { class: "mnb-dim" });
  const status = h("span", { class: "mnb-status mnb-dim", role: "status" });
  const line = h("div", { class: "mnb-timeline", role: "img" });
  const list = h("div", { class: "mnb-failures", role: "list" });
  const items = new Map();
  let pending = null;
  root.append(h("div", { class: "mnb-top" }, h("span", {}, title, " ", facts), status), line, list);
  if (options.failure) root.firstChild.hidden = line.hidden = true;

  function mine() {
    return Object.entries(cluster.state.failures)
      .filter(([id, one]) => (options.failure ? id === options.failure : !options.mesh || one.mesh === options.mesh || cluster.state.meshes[one.mesh]?.on === options.mesh))
      .sort((a, b) => b[1].at - a[1].at);
  }

  function draw() {
    pending = null;
    const found = mine();
    const open = found.filter(([, one]) => one.state === "open").length;
    say(facts, found.length ? `· ${plural(found.length, "failure")}${open ? `, ${open} open` : ", all dealt with"}` : "· none, so far");
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
        item = entry(id, one, found.length === 1 || Boolean(options.failure));
        items.set(id, item);
      }
      item.update(one);
      if (list.children[at] !== item.element) list.insertBefore(item.element, list.children[at] ?? null);
    });
  }

  function drawLine(found) {
    line.hidden = Boolean(options.failure) || found.length < 2;
    if (line.hidden) return;
    const first = Math.min(...found.map(([, one]) => one.at));
    const now = cluster.now();
    const span = Math.max(60, now - first) * 1.03;
    line.setAttribute("aria-label", `time line, the last ${duration(span)}`);
    line.replaceChildren(
      h("span", { class: "mnb-dim", style: "left:0", text: clock(now - span) }),
      h("span", { class: "mnb-dim", style: "right:0", text: "now" }),
      ...found.map(([id, one]) => {
        const [from, to] = [one.at, one.ended ?? now].map((at) => (100 * (at - (now - span))) / span);
        return h("button", { type: "button", class: "mnb-span", "data-end": one.state, title: `${clock(one.at)} ${one.title}`, "aria-label": one.title, style: `left:${from}%;width:max(7px,${to - from}%)`, onclick: () => items.get(id)?.open() });
      }),
    );
  }

  function entry(id, one, opened) {
    const mark = h("span", { class: "mnb-end" });
    const when = h("span", { class: "mnb-dim mnb-when" });
    const message = h("div", { class: "mnb-message", role: "status" });
    const tell = (text, wrong) => {
      message.textContent = text;
      message.classList.toggle("mnb-wrong", Boolean(wrong));
    };
    const heal = askButton("Heal", () => cluster.request("heal", { mesh: one.mesh }), tell, { class: "mnb-b mnb-main" });
    const autopsy = askButton("Post-mortem", () => cluster.request("post_mortem", { mesh: one.mesh, ranks: one.ranks, failure: id }), tell);
    const rows = h("div", { class: "mnb-facts" });
    const body = h("div", { class: "mnb-story" }, rows);
    const element = h("details", { class: "mnb-failure", role: "listitem", open: opened }, h("summary", {}, mark, h("b", { text: one.title }), when), body);
    if (one.traceback) body.append(h("pre", { class: "mnb-trace", tabindex: "0", text: one.traceback }));
    if (one.last_lines) body.append(h("div", { class: "mnb-dim", text: "its last lines" }), h("pre", { class: "mnb-lines mnb-short", tabindex: "0", text: one.last_lines.join("\n") }));
    body.append(h("div", { class: "mnb-buttons" }, heal, autopsy, copyButton("Copy report", () => `${one.title}\n\n${one.report}`)), message);
    return {
      element,
      open() {
        element.open = true;
        element.scrollIntoView({ block: "nearest" });
        element.querySelector("summary").focus();
      },
      update(now) {
        one = now;
        if (element.dataset.end !== one.state) element.dataset.end = one.state;
        say(mark, ENDS[one.state] ?? one.state);
        const lasted = one.ended ? `, ${ENDS[one.state]} after ${duration(one.ended - one.at)}` : "";
        say(when, `${clock(one.at)}${lasted}`);
        heal.hidden = one.state !== "open" || !cluster.live;
        autopsy.hidden = !["exception", "init", "unhandled", "raised"].includes(one.cause) || !cluster.live;
        const place = [one.host && `host ${cluster.state.hosts[one.host]?.name ?? one.host}`, one.pid && `pid ${one.pid}`].filter(Boolean).join(", ");
        const told = (one.told ?? []).map(([who, how]) => tellingOf(who, how)).join(" → ");
        const late = one.detected - one.at;
        const facts = [
          ["what", one.oom ? "the host killed it because it ran out of memory" : ""],
          ["where", place],
          ["detected", late > 0.001 ? `${late < 1 ? `${Math.round(late * 1000)} ms` : duration(late)} later` : "at once"],
          ["told", told],
          ["also hit", (one.also ?? []).join(", ")],
          ["next", one.state === "open" ? one.next : ""],
        ].filter(([, value]) => value);
        rows.replaceChildren(...facts.map(([what, value]) => h("div", {}, h("span", { class: "mnb-dim", text: what }), h("span", { text: value }))));
      },
    };
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
