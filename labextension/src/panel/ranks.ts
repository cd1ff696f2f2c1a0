// In JupyterLab's own debugger: the displayed rank, and the properties of breakpoints that a gutter cannot show.

import type { ISessionContext } from "@jupyterlab/apputils";
import type { KernelMessage } from "@jupyterlab/services";
import type { JSONObject } from "@lumino/coreutils";
import type { Message } from "@lumino/messaging";
import { Widget } from "@lumino/widgets";

import { BACK } from "../page/back";
import { h, setText } from "../page/dom";
import { say } from "../page/language";
import type { Front } from "./front";

const MOST = 64; // ranks of one group that have a button
const ANSWER_MS = 10_000; // a kernel without a debugger never answers
const BEAT_MS = 20_000; // between heartbeats of this page: without them, ranks that it has stopped continue
const AGAIN_MS = 2_000; // before an unanswered request is repeated

export interface RankRow {
  session: string;
  name: string;
}

export interface Threads {
  threads: { id: number; name: string; ranks: RankRow[] }[];
  pinned: boolean;
  lead: string;
}

export interface BreakpointRow {
  name: string;
  line: number;
  source: { path: string };
  condition: string;
  hitCondition: string;
  log: string;
  message?: string;
}

const NONE: Threads = { threads: [], pinned: false, lead: "" };

class NoAnswer extends Error {}

/** Requests of the debug adapter protocol, on the control channel: they are answered while a cell runs. */
export class DebugLink {
  constructor(private _context: () => ISessionContext | null) {}

  async ask<T>(command: string, args: object = {}): Promise<T> {
    const kernel = this._context()?.session?.kernel;
    if (!kernel) throw new Error(say`there is no kernel`);
    const content = { type: "request", seq: this._seq++, command, arguments: args } as unknown as KernelMessage.IDebugRequestMsg["content"];
    const future = kernel.requestDebug(content);
    let late: ReturnType<typeof setTimeout> | undefined;
    const reply = await new Promise<KernelMessage.IDebugReplyMsg>((resolve, reject) => {
      future.onReply = (message) => resolve(message);
      void future.done.catch(reject);
      late = setTimeout(() => reject(new NoAnswer(say`${command} was not answered`)), ANSWER_MS);
    }).finally(() => clearTimeout(late));
    const answer = reply.content as unknown as { success?: boolean; message?: string; body?: T };
    if (answer.success === false) throw new Error(answer.message ?? `${command} failed`);
    return answer.body as T;
  }

  private _seq = 1 << 20;
}

/** A section that JupyterLab's debugger gets: empty while nothing of a mesh is stopped or marked. */
export class RanksSection extends Widget {
  constructor(private _front: Front) {
    super();
    this.id = "mnb-dap-ranks";
    this.title.label = say`Ranks`;
    this.addClass("mnb-dap");
    this._link = new DebugLink(() => this._context);
    this._pin = h("input", { type: "checkbox", onchange: () => void this._focus(this._threads.lead) });
    this.node.append(
      h(
        "div",
        { class: "mnb-v mnb-dap-body" },
        this._note,
        this._list,
        h("label", { class: "mnb-dap-pin" }, this._pin, say`commands go to this rank only`),
        h("b", { class: "mnb-dap-head", text: say`Breakpoints` }),
        this._rows,
        this._wrong,
      ),
    );
    _front.changed.connect(this._changed, this);
    document.addEventListener(BACK, this._back);
    this._changed();
  }

  override dispose(): void {
    document.removeEventListener(BACK, this._back);
    super.dispose();
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    void this._refresh();
  }

  private _changed(): void {
    const context = this._front.notebook?.sessionContext ?? null;
    if (context === this._context) return;
    this._context?.iopubMessage.disconnect(this._heard, this);
    this._context = context;
    context?.iopubMessage.connect(this._heard, this);
    this._draw(NONE, []);
    if (context && this.isVisible) void this._refresh();
  }

  private _heard(_: ISessionContext, message: KernelMessage.IMessage): void {
    if (message.header.msg_type !== "debug_event") return;
    const { event } = message.content as unknown as { event: string };
    if (event === "terminated") this._draw(NONE, []);
    else if (event === "monarchThreads") void this._refresh();
  }

  /** Sends one request at a time; changes meanwhile lead to another one, for the notebook that is in front then. */
  private async _refresh(): Promise<void> {
    this._wanted++;
    if (this._asking) return;
    this._asking = true;
    clearTimeout(this._late);
    for (let answered = 0; answered !== this._wanted; ) {
      answered = this._wanted;
      const context = this._context;
      try {
        const threads = await this._link.ask<Threads>("monarchThreads");
        const marks = await this._link.ask<{ breakpoints: BreakpointRow[] }>("monarchBreakpoints");
        if (context === this._context) this._draw(threads?.threads ? threads : NONE, marks?.breakpoints ?? []);
      } catch (error) {
        if (error instanceof NoAnswer) this._late = setTimeout(() => void this._refresh(), AGAIN_MS);
        else if (context === this._context) this._draw(NONE, []); // a kernel without a mesh
      }
    }
    this._asking = false;
  }

  /** After a reconnect: stops in between may be missing, also in JupyterLab's own lists. */
  private _back = (): void => {
    if (!this.isVisible && !this._threads.threads.length) return;
    void this._refresh().then(() => (this._threads.lead ? this._focus(this._threads.lead) : undefined));
  };

  private async _focus(session: string): Promise<void> {
    await this._do("monarchFocus", { session, pinned: this._pin.checked });
    await this._refresh();
  }

  private async _do(command: string, args: JSONObject): Promise<void> {
    try {
      await this._link.ask(command, args);
      setText(this._wrong, "");
    } catch (error) {
      setText(this._wrong, error instanceof Error ? error.message : String(error));
    }
  }

  private _beat(isWanted: boolean): void {
    if (isWanted === (this._beating !== undefined)) return;
    clearInterval(this._beating);
    const beat = (): void => void this._link.ask("monarchAlive").catch(() => undefined);
    this._beating = isWanted ? setInterval(beat, BEAT_MS) : undefined;
    if (isWanted) beat();
  }

  private _draw(threads: Threads, marks: BreakpointRow[]): void {
    this._beat(threads.threads.length > 0);
    const content = JSON.stringify([threads, marks]);
    if (content === this._drawn) return;
    this._drawn = content;
    this._threads = threads;
    this._pin.checked = threads.pinned;
    const stopped = threads.threads.length;
    setText(this._note, stopped ? "" : say`No rank is stopped. Breakpoints in the methods of actors stop ranks.`);
    this._note.hidden = Boolean(stopped);
    (this._pin.parentElement as HTMLElement).hidden = !stopped;
    this._list.replaceChildren(
      ...threads.threads.map(({ name, ranks }) =>
        h(
          "li",
          {},
          h("div", { class: "mnb-dap-group", text: name, title: name }),
          ...ranks.slice(0, MOST).map((rank) => this._button(rank, threads.lead)),
          ranks.length > MOST ? h("span", { class: "mnb-dim", text: say` and ${ranks.length - MOST} more` }) : null,
        ),
      ),
    );
    this._rows.replaceChildren(...marks.map((mark) => this._row(mark)));
  }

  private _button({ session, name }: RankRow, lead: string): HTMLElement {
    return h("button", {
      class: "mnb-b mnb-dap-rank",
      type: "button",
      text: name,
      title: say`look at ${name}`,
      "aria-pressed": session === lead ? "true" : "false",
      onclick: () => void this._focus(session),
    });
  }

  private _row(mark: BreakpointRow): HTMLElement {
    const input = (label: string, value: string, example: string): HTMLInputElement =>
      h("input", { "aria-label": say`${label} of ${mark.name}`, placeholder: `${label}: ${example}`, value, spellcheck: "false" });
    const condition = input("condition", mark.condition, "@gpus=3 loss > 1");
    const hits = input("hits", mark.hitCondition, "3, >= 3, % 10");
    const log = input("log", mark.log, say`loss is {loss:.3f}`);
    const send = (): void =>
      void this._do("monarchBreakpoint", {
        path: mark.source.path,
        line: mark.line,
        condition: condition.value,
        hitCondition: hits.value,
        log: log.value,
      });
    for (const field of [condition, hits, log]) field.addEventListener("change", send);
    return h("details", { class: "mnb-dap-mark", open: Boolean(mark.condition || mark.hitCondition || mark.log) }, h("summary", { text: mark.name }), condition, hits, log);
  }

  private _asking = false;
  private _beating: ReturnType<typeof setInterval> | undefined;
  private _context: ISessionContext | null = null;
  private _drawn = "";
  private _late: ReturnType<typeof setTimeout> | undefined;
  private _link: DebugLink;
  private _list = h("ul", { class: "mnb-dap-threads" });
  private _note = h("div", { class: "mnb-dim" });
  private _pin: HTMLInputElement;
  private _rows = h("div");
  private _threads: Threads = NONE;
  private _wanted = 0;
  private _wrong = h("div", { class: "mnb-wrong", role: "alert" });
}

/** Adds a section to JupyterLab's debugger, if there is one; it may be created after this extension. */
export function joinDebugger(widgets: () => Iterable<Widget>, section: Widget): boolean {
  for (const widget of widgets()) {
    if (widget.id !== "jp-debugger-sidebar") continue;
    const panel = widget as Widget & { addWidget?: (widget: Widget) => void };
    panel.addWidget?.(section);
    return Boolean(panel.addWidget);
  }
  return false;
}
