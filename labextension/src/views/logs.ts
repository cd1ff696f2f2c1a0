// The log view: lines of the ranks, merged or in lanes, filtered, followed, paused, downloaded.

import type { Cluster } from "../cluster/client";
import type { LogLine, LogMessage } from "../cluster/messages";
import { pointOf } from "../cluster/ranks";
import { ranksFrom } from "../cluster/slices";
import type { Mesh } from "../cluster/state";
import { h, setText } from "../page/dom";
import { eachFrame } from "../page/frames";
import { clock, placeOf, plural } from "../page/words";
import { say } from "../page/language";
import type { View } from "./view";

import "./logs.css";

const KEPT = 5000; // lines
const ASKED = 1000; // lines from before
const LEVELS = ["", "debug", "info", "warning", "error"];
const LANES = 8;
const LANE_LINES = 300;
const TYPING_MS = 250;

/** The lines of a mesh, or of some of its ranks; `lines` have arrived already. */
export interface LogOptions {
  mesh: string;
  ranks?: number[] | undefined;
  lines?: LogLine[];
  text?: string;
  level?: string;
}

export const logView: View<LogOptions> = (cluster, root, options) => {
  const view = new LogView(cluster, root, options);
  return () => view.end();
};

class LogView {
  constructor(
    private _cluster: Cluster,
    root: HTMLElement,
    private _options: LogOptions,
  ) {
    this._mesh = _cluster.state.meshes[_options.mesh];
    this._text.value = _options.text ?? "";
    this._level.value = _options.level ?? "";
    const tools = h("span", { class: "mnb-tools" }, this._where, this._text, this._level, this._mode, this._pause, this._save);
    root.append(
      h("div", { class: "mnb-top mnb-wrap" }, h("span", {}, this._title, " ", this._facts), tools),
      h("div", { class: "mnb-logs" }, this._field, this._down),
    );
    this._listen();
    if (_options.lines) {
      this._lines = _options.lines;
      this._rebuild();
    }
    this._count();
    this._unwatch = _cluster.watch((patch) => (patch === null || patch.meshes?.[_options.mesh] !== undefined) && this._frames.soon(), ["meshes"]);
  }

  end(): void {
    this._unwatch();
    this._unsubscribe?.();
    clearTimeout(this._typing);
    this._frames.cancel();
  }

  private _listen(): void {
    const later = (): void => {
      clearTimeout(this._typing);
      this._typing = setTimeout(() => this._follow(), TYPING_MS);
    };
    this._text.addEventListener("input", later);
    this._where.addEventListener("input", later);
    this._level.addEventListener("change", () => this._follow());
    this._mode.addEventListener("click", () => {
      this._lanes = !this._lanes;
      this._mode.setAttribute("aria-pressed", String(this._lanes));
      this._rebuild();
    });
    this._pause.addEventListener("click", () => this._turnPause());
    this._save.addEventListener("click", () => this._download());
    this._down.addEventListener("click", () => this._toEnd());
    this._field.addEventListener("scroll", () => (this._down.hidden = this._atEnd()), { passive: true });
  }

  private _turnPause(): void {
    this._paused = !this._paused;
    this._pause.textContent = this._paused ? say`Follow` : say`Pause`;
    if (this._paused) return;
    this._add(this._held);
    this._held = [];
    this._toEnd();
  }

  private _download(): void {
    const lines = this._lines.map(([index, time, level, text]) => `${new Date(time * 1000).toISOString()} ${this._name(index)} ${level ? `${level} ` : ""}${text}`);
    const link = h("a", { href: URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/plain" })), download: `${this._mesh?.name ?? "mesh"}.log` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  private _atEnd(): boolean {
    return this._field.scrollTop + this._field.clientHeight >= this._field.scrollHeight - 8;
  }

  private _toEnd(): void {
    this._field.scrollTop = this._field.scrollHeight;
  }

  private _name(index: number): string {
    const mesh = this._mesh;
    return mesh?.labels.length ? placeOf(mesh.labels, pointOf(mesh.sizes, index)) : (mesh?.name ?? "");
  }

  // -- followed ranks ------------------------------------------------------------------------------------------------

  /** The typed ranks, else those of the view; undefined for all. */
  private _ranks(): number[] | undefined {
    const typed = ranksFrom(this._where.value, this._mesh?.labels ?? [], this._mesh?.sizes ?? []);
    this._where.classList.toggle("mnb-wrong", typed === undefined);
    return typed ?? this._options.ranks ?? undefined;
  }

  private _follow(): void {
    this._unsubscribe?.();
    const [text, level] = [this._text.value || undefined, this._level.value || undefined];
    const watch = { topic: "logs" as const, mesh: this._options.mesh, ranks: this._ranks(), text, level, lines: ASKED };
    this._unsubscribe = this._cluster.subscribe(watch, (message) => this._take(message));
  }

  private _take({ reset, lines, skipped = 0 }: LogMessage): void {
    if (reset) {
      this._held = [];
      this._skipped = skipped;
      this._lines = lines.slice(-KEPT);
      this._rebuild();
    } else {
      this._skipped += skipped;
      if (this._paused) this._held.push(...lines);
      else this._add(lines);
    }
    if (this._paused) setText(this._pause, say`Follow (${this._held.length})`);
  }

  // -- drawing -------------------------------------------------------------------------------------------------------

  private _add(lines: readonly LogLine[]): void {
    this._lines.push(...lines);
    this._lines.splice(0, Math.max(0, this._lines.length - KEPT));
    const follows = this._atEnd();
    if (this._lanes) this._drawLanes();
    else {
      this._field.append(...lines.slice(-KEPT).map((line) => this._row(line)));
      while (this._field.childElementCount > KEPT) this._field.firstElementChild?.remove();
    }
    if (follows) this._toEnd();
    else this._down.hidden = false;
    this._count();
  }

  private _row([index, time, level, text]: LogLine, hasName = true): HTMLElement {
    const rank = hasName ? h("span", { class: "mnb-who", style: `--hue:${(index * 47) % 360}`, text: this._name(index) }) : null;
    return h("div", { class: "mnb-line", "data-level": level || null, title: clock(time) }, rank, h("span", { text }));
  }

  private _rebuild(): void {
    this._field.classList.toggle("mnb-lanes", this._lanes);
    if (this._lanes) this._drawLanes();
    else this._field.replaceChildren(...this._lines.map((line) => this._row(line)));
    this._toEnd();
    this._count();
  }

  private _drawLanes(): void {
    const byRank = new Map<number, LogLine[]>();
    for (const line of this._lines) {
      const lane = byRank.get(line[0]);
      if (lane) lane.push(line);
      else byRank.set(line[0], [line]);
    }
    const lanes = [...byRank].sort(([a], [b]) => a - b);
    this._field.replaceChildren(
      ...lanes.slice(0, LANES).map(([index, lines]) =>
        h("div", { class: "mnb-lane" }, h("div", { class: "mnb-lane-head", text: this._name(index) }), ...lines.slice(-LANE_LINES).map((line) => this._row(line, false))),
      ),
    );
    if (lanes.length > LANES) this._field.append(h("div", { class: "mnb-dim mnb-lane", text: say`${lanes.length - LANES} more: pick ranks above` }));
    for (const lane of this._field.children) lane.scrollTop = lane.scrollHeight;
  }

  private _count(): void {
    setText(this._title, this._mesh?.name ?? "");
    const parts = [plural(this._lines.length, "line")];
    if (this._skipped) parts.push(say`${this._skipped} not shown`);
    if (!this._cluster.live) parts.push(say`state at ${clock(this._cluster.now())}`);
    setText(this._facts, `· ${parts.join(" · ")}`);
  }

  private _draw(): void {
    this._mesh = this._cluster.state.meshes[this._options.mesh] ?? this._mesh;
    if (this._mesh && !this._unsubscribe && this._cluster.live) this._follow();
    this._count();
  }

  private _down = h("button", { class: "mnb-b mnb-down", type: "button", text: say`newest ↓`, hidden: true });
  private _facts = h("span", { class: "mnb-dim" });
  private _field = h("div", { class: "mnb-log", role: "log", tabindex: "0", "aria-label": say`lines` });
  private _frames = eachFrame(() => this._draw());
  private _held: LogLine[] = []; // lines that arrived during a pause
  private _lanes = false;
  private _level = h("select", { class: "mnb-pick", "aria-label": say`level` }, ...LEVELS.map((level) => h("option", { value: level, text: level || say`all levels` })));
  private _lines: LogLine[] = [];
  private _mesh: Mesh | undefined;
  private _mode = h("button", { class: "mnb-b", type: "button", "aria-pressed": "false", text: say`Lanes` });
  private _pause = h("button", { class: "mnb-b", type: "button", text: say`Pause` });
  private _paused = false;
  private _save = h("button", { class: "mnb-b", type: "button", text: say`Download` });
  private _skipped = 0;
  private _text = h("input", { class: "mnb-pick mnb-find", type: "search", placeholder: say`filter text`, "aria-label": say`filter text` });
  private _title = h("b");
  private _typing: ReturnType<typeof setTimeout> | undefined;
  private _unsubscribe: (() => void) | null = null;
  private _unwatch: () => void;
  private _where = h("input", { class: "mnb-pick mnb-where", placeholder: say`ranks: 0-3, gpus=1`, "aria-label": say`ranks` });
}
