// The timeline drawn by the kernel: zoom, search, and both ends of the chosen call.

import type { Cluster } from "../cluster/client";
import type { TimelineMessage } from "../cluster/messages";
import { askButton, messageLine } from "../page/buttons";
import { h, setText } from "../page/dom";
import { plural } from "../page/words";
import { say } from "../page/language";
import { Picture } from "./picture";
import type { View } from "./view";

import "./timeline.css";

const nothing = (): string => say`no timeline yet: %timeline trainers records one`;
const LABELS = 150; // px of the column of names, at most
const DRAG = 4; // px: shorter drags are clicks
const LEAST_S = 1e-5;
const RESIZED_MS = 200;

/** The timeline with this key, or the newest. The rest is its saved form, for a page without a kernel. */
export interface TimelineOptions {
  key?: string;
  name?: string;
  facts?: string[];
  seconds?: number;
  svg?: string;
  /** The moment to show, in the kernel's time. */
  at?: number | undefined;
}

export const timelineView: View<TimelineOptions> = (cluster, root, options) => {
  const view = new TimelineView(cluster, root, options);
  return () => view.end();
};

class TimelineView {
  constructor(
    private _cluster: Cluster,
    private _root: HTMLElement,
    private _options: TimelineOptions,
  ) {
    _root.classList.add("mnb-tl-view");
    const tool = (text: string, title: string, act: () => void): HTMLButtonElement => h("button", { class: "mnb-b", type: "button", text, title, "aria-label": title, onclick: act });
    const { message, report } = messageLine();
    this._details = message;
    const ask = (verb: "stop" | "save") => () => _cluster.request("timeline", { do: verb, key: this._shown?.key ?? "" });
    this._stop = askButton(say`Stop`, ask("stop"), report, { title: say`ends the recording` });
    this._save = askButton(say`Save`, ask("save"), report, { title: say`writes a file for ui.perfetto.dev` });
    this._tools.append(
      this._query,
      tool("◀", "earlier", () => this._pan(-0.5)),
      tool("▶", "later", () => this._pan(0.5)),
      tool("−", say`zoom out`, () => this._zoom(2)),
      tool("+", say`zoom in`, () => this._zoom(0.5)),
      tool(say`All`, say`show all of it`, () => this._look(0, null)),
      this._stop,
      this._save,
    );
    _root.append(h("div", { class: "mnb-top mnb-wrap" }, h("span", {}, this._title, " ", this._facts), this._tools), this._notes, this._picture, message);
    this._query.addEventListener("input", () => this._mark());
    this._query.addEventListener("keydown", (event) => event.key === "Enter" && this._next());
    this._picture.addEventListener("pointerdown", (event) => this._drag(event));
    this._picture.addEventListener("dblclick", () => this._look(0, null));
    this._picture.addEventListener("keydown", (event) => this._key(event));
    this._unwatch = _cluster.watch((patch) => patch === null && this._connected(), []);
    this._resized.observe(this._picture);
    if (_options.svg !== undefined) this._draw({ type: "timeline", id: "", notes: [], key: "", name: "", facts: [], began: 0, recording: false, begin: 0, end: _options.seconds ?? 0, seconds: 0, ..._options, svg: _options.svg });
    else setText(this._details, nothing());
    this._connected();
  }

  end(): void {
    this._unwatch();
    this._unsubscribe?.();
    this._image.end();
    this._resized.disconnect();
    clearTimeout(this._resizing);
    this._root.replaceChildren();
  }

  private _connected(): void {
    const live = this._cluster.live;
    for (const tool of this._tools.children) (tool as HTMLElement).hidden = !live && tool !== this._query;
    this._stop.hidden = !live || !this._shown?.recording;
    if (live && !this._unsubscribe) this._look(null, null);
  }

  /** Shows some seconds of it: from one time to another; `end` null follows it. */
  private _look(begin: number | null, end: number | null): void {
    if (!this._cluster.live) return;
    this._unsubscribe?.();
    this._width = Math.round(this._picture.clientWidth) || this._width;
    const watch = { topic: "timeline", key: this._options.key, width: this._width || undefined, begin, end } as const;
    this._window = [begin, end];
    this._unsubscribe = this._cluster.subscribe(watch, (message) => this._draw(message));
  }

  private _draw(message: TimelineMessage): void {
    const first = !this._shown?.began;
    if (!message.svg) return setText(this._details, this._shown ? "" : nothing());
    if (this._dragging) return;
    if (!this._shown && this._details.textContent === nothing()) setText(this._details, "");
    this._shown = message;
    setText(this._title, say`Timeline of ${message.name}`);
    const part = message.end - message.begin < message.seconds - 0.01 ? [say`shown ${message.begin.toFixed(2)} to ${message.end.toFixed(2)} s`] : [];
    setText(this._facts, [...message.facts, ...part].map((fact) => `· ${fact}`).join(" "));
    setText(this._notes, message.notes.map((note) => `! ${note}`).join("\n"));
    this._notes.hidden = !message.notes.length;
    this._stop.hidden = !message.recording || !this._cluster.live;
    this._image.show(message.svg);
    const { at } = this._options;
    if (first && at !== undefined && message.began) this._look(Math.max(0, at - message.began - 5), at - message.began + 5);
  }

  // -- position---------------------------------------------------------------------------------------------------

  private _zoom(factor: number): void {
    if (!this._shown) return;
    const { begin, end } = this._shown;
    const middle = this._chosen()?.middle ?? (begin + end) / 2;
    this._clamped(middle - (middle - begin) * factor, middle + (end - middle) * factor);
  }

  private _pan(part: number): void {
    if (!this._shown) return;
    const { begin, end, seconds } = this._shown;
    const by = Math.max(-begin, Math.min(seconds - end, part * (end - begin)));
    this._clamped(begin + by, end + by);
  }

  private _clamped(begin: number, end: number): void {
    const seconds = this._shown?.seconds ?? 0;
    if (end - begin < LEAST_S) return;
    if (begin <= 0 && end >= seconds) this._look(0, null);
    else this._look(Math.max(0, begin), Math.min(seconds, end));
  }

  /** The time at a distance from the left edge. */
  private _time(x: number): number {
    const { begin = 0, end = 0 } = this._shown ?? {};
    const svg = this._picture.querySelector("svg");
    const drawnWidth = Number(svg?.getAttribute("width")) || 1;
    const scale = (svg?.getBoundingClientRect().width || drawnWidth) / drawnWidth;
    const labels = Math.min(LABELS, Math.floor(drawnWidth / 4));
    const part = (x / scale - labels) / (drawnWidth - labels - 8);
    return begin + Math.max(0, Math.min(1, part)) * (end - begin);
  }

  private _drag(event: PointerEvent): void {
    if (event.button !== 0 || !this._shown) return;
    const { left } = this._picture.getBoundingClientRect();
    const from = event.clientX - left;
    const bar = (event.target as Element).closest<SVGElement>(".b");
    const range = h("div", { class: "mnb-tl-range", hidden: true });
    this._picture.append(range);
    this._dragging = true;
    const move = ({ clientX }: PointerEvent): void => {
      const to = clientX - left;
      range.hidden = Math.abs(to - from) < DRAG;
      range.style.left = `${Math.min(from, to)}px`;
      range.style.width = `${Math.abs(to - from)}px`;
    };
    const up = ({ clientX }: PointerEvent): void => {
      window.removeEventListener("pointermove", move);
      window.removeEventListener("pointerup", up);
      range.remove();
      this._dragging = false;
      const to = clientX - left;
      if (Math.abs(to - from) < DRAG) this._choose(bar);
      else if (this._cluster.live) this._clamped(this._time(Math.min(from, to)), this._time(Math.max(from, to)));
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", up);
  }

  // -- what -------------------------------------------------------------------------------------------------------

  private get _bars(): SVGElement[] {
    return [...this._picture.querySelectorAll<SVGElement>(".b")];
  }

  /** The chosen bar as drawn now, and the time at its middle. */
  private _chosen(): { bar: SVGElement; middle: number } | null {
    const bar = this._picture.querySelector<SVGElement>(".b.mnb-at");
    if (!bar) return null;
    const { left, width } = bar.getBoundingClientRect();
    return { bar, middle: this._time(left + width / 2 - this._picture.getBoundingClientRect().left) };
  }

  /** Chooses a bar: highlights its call at both ends. */
  private _choose(bar: SVGElement | null): void {
    this._picked = bar && { about: aboutOf(bar), call: bar.dataset.c ?? "" };
    this._mark();
    if (!bar) return setText(this._details, "");
    const call = this._picked?.call ? this._bars.find((candidate) => candidate.dataset.c === this._picked?.call) : undefined;
    const ends = call && call !== bar ? ` — ${aboutOf(call)}` : "";
    this._details.classList.remove("mnb-wrong");
    setText(this._details, aboutOf(bar) + ends);
  }

  /** Marks the chosen bar and the matches of the search. */
  private _mark(): void {
    const query = this._query.value.trim().toLowerCase();
    const { about = "", call = "" } = this._picked ?? {};
    let count = 0;
    let hasChosen = false;
    for (const bar of this._bars) {
      const isChosen = Boolean(about) && aboutOf(bar) === about;
      const on = isChosen || (Boolean(call) && bar.dataset.c === call);
      const isOther = Boolean(query) && !aboutOf(bar).toLowerCase().includes(query);
      hasChosen ||= on;
      count += Number(!isOther);
      bar.classList.toggle("mnb-at", isChosen);
      bar.classList.toggle("mnb-on", on);
      bar.classList.toggle("mnb-other", isOther);
    }
    this._picture.querySelector("svg")?.classList.toggle("mnb-chosen", hasChosen);
    if (query) setText(this._details, count ? say`${plural(count, "match", "matches")} in what is shown: Enter goes to the next` : say`no match in what is shown`);
  }

  /** Chooses the next match of the search. */
  private _next(): void {
    const bars = this._bars.filter((bar) => !bar.classList.contains("mnb-other"));
    const index = bars.findIndex((bar) => bar.classList.contains("mnb-at"));
    this._choose(bars[(index + 1) % bars.length] ?? null);
  }

  private _key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves: Record<string, () => void> = {
      ArrowLeft: () => this._step(-1),
      ArrowRight: () => this._step(1),
      ArrowUp: () => this._row(-1),
      ArrowDown: () => this._row(1),
      "+": () => this._zoom(0.5),
      "=": () => this._zoom(0.5),
      "-": () => this._zoom(2),
      "0": () => this._look(0, null),
      PageUp: () => this._pan(-0.5),
      PageDown: () => this._pan(0.5),
      Escape: () => this._choose(null),
    };
    const move = moves[event.key];
    if (!move || (event.key === "Escape" && !this._picked)) return;
    event.preventDefault();
    event.stopPropagation();
    move();
  }

  /** Chooses the bar before or after the chosen one in its row. */
  private _step(by: number): void {
    const bar = this._chosen()?.bar;
    const row = bar?.closest(".r") ?? this._picture.querySelector(".r");
    const bars = sorted([...(row?.querySelectorAll<SVGElement>(".b") ?? [])]);
    this._choose((bar ? bars[bars.indexOf(bar) + by] : bars[0]) ?? bar ?? null);
  }

  /** Chooses the bar of the row above or below that is next to the chosen one. */
  private _row(by: number): void {
    const bar = this._chosen()?.bar;
    const rows = [...this._picture.querySelectorAll(".r")].filter((row) => row.querySelector(".b"));
    if (!bar) return this._choose(rows[0]?.querySelector<SVGElement>(".b") ?? null);
    const row = rows[rows.indexOf(bar.closest(".r") as Element) + by];
    const { left } = bar.getBoundingClientRect();
    const distance = (element: SVGElement): number => Math.abs(element.getBoundingClientRect().left - left);
    const near = [...(row?.querySelectorAll<SVGElement>(".b") ?? [])].sort((first, second) => distance(first) - distance(second))[0];
    if (near) this._choose(near);
  }

  private _details: HTMLElement;
  private _dragging = false;
  private _facts = h("span", { class: "mnb-dim" });
  private _notes = h("div", { class: "mnb-dim", style: "white-space:pre-line", hidden: true });
  private _picked: { about: string; call: string } | null = null;
  private _picture = h("div", { class: "mnb-tl-picture", tabindex: "0", role: "group", "aria-label": say`timeline: arrow keys choose a call, + and − zoom, 0 shows all`, title: "" });
  private _query = h("input", { class: "mnb-query", type: "search", placeholder: say`Search`, "aria-label": say`search calls and spans` });
  private _image = new Picture(this._picture, () => (this._picked || this._query.value.trim()) && this._mark());
  private _resizing: ReturnType<typeof setTimeout> | undefined;
  private _resized = new ResizeObserver(() => {
    clearTimeout(this._resizing);
    this._resizing = setTimeout(() => Math.abs(this._picture.clientWidth - this._width) > 8 && this._picture.clientWidth && this._unsubscribe && this._look(...this._window), RESIZED_MS);
  });
  private _save: HTMLButtonElement;
  private _shown: TimelineMessage | null = null;
  private _stop: HTMLButtonElement;
  private _title = h("b");
  private _tools = h("span", { class: "mnb-tools" });
  private _unsubscribe: (() => void) | null = null;
  private _unwatch: () => void;
  private _width = 0;
  private _window: [number | null, number | null] = [null, null];
}

const aboutOf = (bar: Element): string => bar.querySelector("title")?.textContent ?? "";

function sorted(bars: SVGElement[]): SVGElement[] {
  return bars.sort((first, second) => first.getBoundingClientRect().left - second.getBoundingClientRect().left);
}
