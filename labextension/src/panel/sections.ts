// The sections of the panel. Each is alive only while it can be seen.

import type { Message } from "@lumino/messaging";
import { Widget } from "@lumino/widgets";

import type { Actions, Verb } from "./actions";
import type { Cluster } from "../cluster/client";
import { countOf, pointOf, sizeOf, unheldOf } from "../cluster/ranks";
import type { ClusterState } from "../cluster/state";
import { eachFrame, h, setText, setFacts } from "../page/dom";
import { FIND_FROM, queryLine } from "../page/query";
import { placeOf } from "../page/words";
import { debugView } from "../views/debugger";
import { failureView } from "../views/failures";
import { findingsView } from "../views/findings";
import { logView } from "../views/logs";
import { tensorView } from "../views/tensors";
import { transferView } from "../views/transfers";
import { drawKernelView } from "./kernelview";
import { Row, countsAt, factsOf, lookOf, targetOf } from "./tree";
import { TreeView, isStructural } from "./treeview";

/** A part of the panel that shows a cluster. */
export abstract class Section extends Widget {
  constructor(id: string, label: string) {
    super();
    this.id = `mnb-section-${id}`;
    this.title.label = label;
    this.addClass("mnb-section");
    this.node.append(this.body);
  }

  /** What a section draws into: the node itself is laid out by the panel. */
  protected readonly body = h("div", { class: "mnb-v" });

  set cluster(cluster: Cluster | null) {
    if (cluster === this._cluster) return;
    this._stop();
    this._cluster = cluster;
    if (this.isVisible) this._start();
  }

  get cluster(): Cluster | null {
    return this._cluster;
  }

  /** Builds what is seen; the result ends it. */
  protected abstract mount(cluster: Cluster): () => void;

  protected again(): void {
    this._stop();
    if (this.isVisible) this._start();
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this._start();
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    if (this.isVisible) this._start();
  }

  protected override onBeforeHide(message: Message): void {
    this._stop();
    super.onBeforeHide(message);
  }

  protected override onBeforeDetach(message: Message): void {
    this._stop();
    super.onBeforeDetach(message);
  }

  private _start(): void {
    if (!this._end && this._cluster) this._end = this.mount(this._cluster);
  }

  private _stop(): void {
    this._end?.();
    this._end = null;
  }

  private _cluster: Cluster | null = null;
  private _end: (() => void) | null = null;
}

/** Calls `draw` once for all changes between two frames. */
function drawing(cluster: Cluster, draw: (structure: boolean) => void, every = 0): () => void {
  let structure = false;
  const frames = eachFrame(() => {
    const built = structure;
    structure = false;
    draw(built);
  });
  const end = cluster.watch((patch) => {
    structure ||= isStructural(patch);
    frames.soon();
  });
  const ticking = every ? setInterval(frames.soon, every) : undefined;
  draw(true);
  return () => {
    end();
    clearInterval(ticking);
    frames.cancel();
  };
}

export class MeshSection extends Section {
  constructor(private _select: (row: Row | null) => void, menu: (row: Row, event: MouseEvent) => void) {
    super("meshes", "Meshes");
    this.view = new TreeView({ select: (row) => this._select(row), menu });
    this.body.append(this._query, this.view.node, this._unheld);
  }

  readonly view: TreeView;

  protected mount(cluster: Cluster): () => void {
    return drawing(
      cluster,
      (structure) => {
        if (structure) this._query.hidden = !this._query.value && Object.values(cluster.state.meshes).every((mesh) => sizeOf(mesh) < FIND_FROM);
        this.view.show(cluster.state, cluster.now(), structure);
        this._drawUnheld(cluster);
      },
      1000,
    );
  }

  /** A line about meshes that nothing refers to, and a button that ends them. */
  private _drawUnheld(cluster: Cluster): void {
    const unheld = unheldOf(cluster.state);
    this._unheld.hidden = !unheld.length || !cluster.live;
    if (this._unheld.hidden) return;
    const names = [...new Set(unheld.map((uid) => cluster.state.meshes[uid]?.name ?? ""))].join(", ");
    setText(this._unheldText, unheld.length === 1 ? `Nothing refers to ${names} any more.` : `Nothing refers to ${unheld.length} meshes any more: ${names}.`);
    setText(this._endThem, unheld.length === 1 ? "End it" : "End them");
    this._endThem.onclick = () => {
      this._endThem.disabled = true;
      const asked = unheldOf(cluster.state).map((uid) => cluster.request("stop", { mesh: uid }));
      void Promise.allSettled(asked).then(() => (this._endThem.disabled = false));
    };
  }

  private _endThem = h("button", { class: "mnb-b", type: "button" });
  private _unheldText = h("span");
  private _unheld = h("div", { class: "mnb-unheld", role: "status", hidden: true }, this._unheldText, " ", this._endThem);

  private _query = queryLine((query) => (this.view.query = query));

  protected override onResize(message: Widget.ResizeMessage): void {
    super.onResize(message);
    this.view.draw();
  }
}

const TAIL = 80;

/** What is selected in the tree: facts, buttons, its last lines or where it is. */
export class SelectedSection extends Section {
  constructor(
    private _actions: Actions,
    private _logs: (uid: string, ranks: number[] | null) => void,
    private _ask: (uid: string) => void,
  ) {
    super("selected", "Selected");
    const button = (label: string, act: () => void): HTMLButtonElement => h("button", { class: "mnb-b", type: "button", text: label, onclick: act });
    const verb = (what: Verb) => (): void => {
      const target = this._row && targetOf(this._row);
      if (target) void this._actions.act(what, target.uid, target.ranks);
    };
    this._heal = button("Heal", verb("heal"));
    this._interrupt = button("Interrupt", verb("interrupt"));
    this._stack = button("Stack", () => void this._showStack());
    this._stop_ = button("Stop", verb("stop"));
    const why = button("Why?", () => {
      const target = this._row && targetOf(this._row);
      if (target) this._ask(target.uid);
    });
    why.title = "which ranks of this mesh hold others up";
    const logs = button("Logs", () => {
      const target = this._row && targetOf(this._row);
      if (target) this._logs(target.uid, target.ranks);
    });
    this.body.append(h("div", { class: "mnb-buttons" }, this._heal, this._interrupt, this._stack, why, logs, this._stop_), this._facts, this._lines);
  }

  set row(row: Row | null) {
    if (row?.key === this._row?.key) return;
    this._row = row;
    this.again();
  }

  protected mount(cluster: Cluster): () => void {
    this._lines.textContent = "";
    this._stacked = false;
    const row = this._row;
    if (!row) {
      setText(this._facts, "");
      this.title.label = "Selected";
      return () => undefined;
    }
    this.title.label = `Selected: ${lookOf(cluster.state, row, cluster.now()).name}`;
    const ends = [drawing(cluster, () => this._draw(cluster), 1000), this._follow(cluster, row)];
    return () => ends.forEach((end) => end());
  }

  private _follow(cluster: Cluster, row: Row): () => void {
    const { uid, ranks } = targetOf(row);
    const mesh = cluster.state.meshes[uid];
    const tail: string[] = [];
    const single = ranks?.length === 1;
    return cluster.subscribe({ topic: "logs", mesh: uid, ranks: ranks ?? undefined, lines: TAIL }, ({ reset, lines }) => {
      if (reset) tail.length = 0;
      for (const [index, , , text] of lines) tail.push(single || !mesh?.labels.length ? text : `${placeOf(mesh.labels, pointOf(mesh.sizes, index))}  ${text}`);
      tail.splice(0, Math.max(0, tail.length - TAIL));
      if (this._stacked) return;
      const down = this._lines.scrollTop + this._lines.clientHeight >= this._lines.scrollHeight - 4;
      setText(this._lines, tail.join("\n") || "no output yet");
      if (down) this._lines.scrollTop = this._lines.scrollHeight;
    });
  }

  private async _showStack(): Promise<void> {
    const { cluster, _row: row } = this;
    const mesh = row && cluster?.state.meshes[row.uid];
    if (!row || !cluster || !mesh) return;
    const { uid, ranks } = targetOf(row);
    this._stacked = true;
    setText(this._lines, "asking the processes …");
    try {
      const wanted = (ranks ?? Array.from({ length: 16 }, (_, at) => at)).slice(0, Math.min(16, countOf(mesh.sizes)));
      const { stacks } = await cluster.request("stack", { mesh: uid, ranks: wanted });
      const several = Object.keys(stacks).length > 1;
      setText(this._lines, Object.entries(stacks).map(([index, text]) => (several ? `── ${placeOf(mesh.labels, pointOf(mesh.sizes, Number(index)))}\n${text}` : text)).join("\n"));
    } catch (error) {
      setText(this._lines, (error as Error).message);
    }
    this._lines.scrollTop = 0;
  }

  private _draw(cluster: Cluster): void {
    const row = this._row;
    if (!row) return;
    const facts = factsOf(cluster.state, row, cluster.now());
    const { uid, ranks } = targetOf(row);
    const counts = countsAt(cluster.state, uid, ranks);
    const stopped = Boolean(cluster.state.meshes[uid]?.stopped) || !cluster.live;
    const living = (counts.busy ?? 0) + (counts.idle ?? 0) + (counts.paused ?? 0) + (counts.unresponsive ?? 0);
    able(this._heal, !stopped && Boolean(counts.failed));
    this._heal.classList.toggle("mnb-main", !stopped && Boolean(counts.failed));
    able(this._interrupt, !stopped && Boolean(counts.busy));
    able(this._stack, !stopped && living > 0);
    able(this._stop_, !stopped);
    setFacts(this._facts, facts);
  }

  private _facts = h("div", { class: "mnb-facts" });
  private _heal: HTMLButtonElement;
  private _interrupt: HTMLButtonElement;
  private _lines = h("pre", { class: "mnb-lines", tabindex: "0", "aria-label": "last lines" });
  private _row: Row | null = null;
  private _stack: HTMLButtonElement;
  private _stacked = false;
  private _stop_: HTMLButtonElement;
}

function able(button: HTMLButtonElement, can: boolean): void {
  if (button.disabled === can) button.disabled = !can;
}

export class FailureSection extends Section {
  constructor() {
    super("failures", "Failures");
  }

  protected mount(cluster: Cluster): () => void {
    const root = h("div");
    this.body.append(root);
    const end = failureView(cluster, root, {});
    return () => {
      end();
      root.remove();
    };
  }

  /** Says in the title how many are not healed; also while it is closed. */
  count(state: ClusterState): void {
    const open = Object.values(state.failures).filter((failure) => failure.state === "open").length;
    this.title.label = open ? `Failures · ${open} not healed` : "Failures";
  }
}

/** Why nothing moves, and which rank is slow. */
export class FindingSection extends Section {
  constructor() {
    super("findings", "Findings");
  }

  /** Looks for the reason now: of one mesh, or of all that do something. */
  ask(mesh: string | undefined): void {
    this._asked = { mesh, ask: true };
    this.again();
  }

  protected mount(cluster: Cluster): () => void {
    const root = h("div");
    this.body.append(root);
    const end = findingsView(cluster, root, this._asked);
    this._asked = { mesh: this._asked.mesh, ask: false };
    return () => {
      end();
      root.remove();
    };
  }

  private _asked: { mesh: string | undefined; ask: boolean } = { mesh: undefined, ask: false };
}

export class LogSection extends Section {
  constructor() {
    super("logs", "Logs");
    this._pick.addEventListener("change", () => this.follow(this._pick.value, null));
  }

  /** Shows the lines of a mesh, or of some of its ranks. */
  follow(uid: string, ranks: number[] | null): void {
    this._uid = uid;
    this._ranks = ranks;
    this.again();
  }

  protected mount(cluster: Cluster): () => void {
    const root = h("div", { class: "mnb-fill" });
    this.body.append(h("div", { class: "mnb-top" }, h("label", {}, h("span", { class: "mnb-dim", text: "of " }), this._pick)), root);
    let end: (() => void) | null = null;
    let shown = "";
    const draw = (): void => {
      const meshes = Object.entries(cluster.state.meshes).filter(([uid, mesh]) => (!mesh.stopped && !mesh.inner) || uid === this._uid);
      const offered = JSON.stringify(meshes.map(([uid, mesh]) => [uid, mesh.name]));
      if (offered !== this._offered) {
        this._offered = offered;
        this._pick.replaceChildren(...meshes.map(([uid, mesh]) => h("option", { value: uid, text: mesh.name })));
      }
      if (!meshes.some(([uid]) => uid === this._uid)) [this._uid, this._ranks] = [meshes[0]?.[0] ?? "", null];
      this._pick.value = this._uid;
      if (this._uid === shown) return;
      shown = this._uid;
      end?.();
      root.replaceChildren();
      end = shown ? logView(cluster, root, { mesh: shown, ranks: this._ranks ?? undefined }) : null;
    };
    const stop = drawing(cluster, (structure) => structure && draw());
    return () => {
      stop();
      end?.();
      this.body.replaceChildren();
    };
  }

  private _offered = "";
  private _pick = h("select", { class: "mnb-pick", "aria-label": "mesh" });
  private _ranks: number[] | null = null;
  private _uid = "";
}

export class DebugSection extends Section {
  /** `area` gives the element in which a prompt may be left. */
  constructor(private _area: () => HTMLElement | null) {
    super("sessions", "Debugger");
  }

  protected mount(cluster: Cluster): () => void {
    const root = h("div");
    this.body.append(root);
    const end = debugView(cluster, root, { area: this._area });
    return () => {
      end();
      root.remove();
    };
  }

  /** Says in the title how many are stopped; also while it is closed. */
  count(state: ClusterState): void {
    const stopped = Object.keys(state.sessions).length;
    this.title.label = stopped ? `Debugger · ${stopped} stopped` : "Debugger";
  }
}

export class TensorSection extends Section {
  constructor() {
    super("tensors", "Tensors");
  }

  protected mount(cluster: Cluster): () => void {
    const root = h("div");
    this.body.append(root);
    const end = tensorView(cluster, root, { open: this._open, current: true });
    return () => {
      end();
      root.remove();
    };
  }

  private _open = { id: "" }; // sections are hidden for a moment when the theme changes
}

export class TransferSection extends Section {
  constructor() {
    super("transfers", "Transfers");
  }

  protected mount(cluster: Cluster): () => void {
    const root = h("div");
    this.body.append(root);
    const end = transferView(cluster, root, { current: true });
    return () => {
      end();
      root.remove();
    };
  }
}

/** A view that the kernel has brought. */
export class KernelSection extends Section {
  constructor(
    readonly name: string,
    readonly label: string,
  ) {
    super(`view-${name}`, label);
  }

  protected mount(cluster: Cluster): () => void {
    const root = h("div");
    this.body.append(root);
    const end = drawKernelView(cluster, this.name, root);
    return () => {
      end();
      root.remove();
    };
  }
}
