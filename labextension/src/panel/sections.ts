// The sections of the panel. Each is active only while it is visible.

import type { Actions } from "./actions";
import type { Cluster } from "../cluster/client";
import { pointOf, sizeOf, unheldOf } from "../cluster/ranks";
import type { LeftMesh, RunningJob } from "../cluster/messages";
import type { ClusterState } from "../cluster/state";
import { h, setText, setFacts } from "../page/dom";
import { eachFrame } from "../page/frames";
import { phrase, say } from "../page/language";
import { FIND_FROM, queryLine } from "../page/query";
import { placeOf } from "../page/words";
import { debugView } from "../views/debugger";
import { failureView } from "../views/failures";
import { findingsView } from "../views/findings";
import { historyView } from "../views/history";
import { logView } from "../views/logs";
import { tensorView } from "../views/tensors";
import { type TimelineOptions, timelineView } from "../views/timeline";
import { transferView } from "../views/transfers";
import { variableView } from "../views/variables";
import { stacksText } from "./answers";
import { ACTIONS, type Action, type Target } from "./table";
import { type Row, factsOf, lookOf, targetOf } from "./tree";
import { TreeView, isStructural } from "./treeview";

/** A part of the panel that shows a cluster, while it is shown. */
export abstract class Section {
  readonly node: HTMLElement;
  /** Called when its label changes. */
  renamed: (label: string) => void = () => undefined;

  constructor(
    readonly id: string,
    private _label: string,
  ) {
    this.node = h("div", { class: `mnb-section mnb-section-${id}` }, this.body);
  }

  /** The element that a section draws into; the panel lays out the node itself. */
  protected readonly body = h("div", { class: "mnb-v", tabindex: "0" }); // it scrolls

  get label(): string {
    return this._label;
  }

  set label(label: string) {
    if (label === this._label) return;
    this._label = label;
    this.renamed(label);
  }

  set cluster(cluster: Cluster | null) {
    if (cluster === this._cluster) return;
    this._stop();
    this._cluster = cluster;
    if (this._shown) this._start();
  }

  get cluster(): Cluster | null {
    return this._cluster;
  }

  /** Whether it is visible. */
  set shown(isShown: boolean) {
    this._shown = isShown;
    if (isShown) this._start();
    else this._stop();
  }

  /** Builds the content; the result ends it. */
  protected abstract mount(cluster: Cluster): () => void;

  /** Focuses the section. */
  focus(): void {
    this.body.focus();
  }

  protected again(): void {
    this._stop();
    if (this._shown) this._start();
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
  private _shown = false;
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
  constructor(private _select: (row: Row | null) => void, menu: (x: number, y: number) => void, key: (event: KeyboardEvent) => boolean) {
    super("meshes", say`Meshes`);
    this.view = new TreeView({ select: (row) => this._select(row), menu, key });
    this.body.removeAttribute("tabindex"); // the tree in it scrolls
    this.body.append(this._query, this.view.node, this._unheld);
  }

  readonly view: TreeView;

  override focus(): void {
    this.view.node.focus();
  }

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
    setText(this._unheldText, unheld.length === 1 ? say`Nothing refers to ${names} any more.` : say`Nothing refers to ${unheld.length} meshes any more: ${names}.`);
    setText(this._endThem, unheld.length === 1 ? say`End it` : say`End them`);
    this._endThem.onclick = () => {
      this._endThem.disabled = true;
      const requests = unheldOf(cluster.state).map((uid) => cluster.request("stop", { mesh: uid }));
      void Promise.allSettled(requests).then(() => (this._endThem.disabled = false));
    };
  }

  private _endThem = h("button", { class: "mnb-b", type: "button" });
  private _unheldText = h("span");
  private _unheld = h("div", { class: "mnb-unheld", role: "status", hidden: true }, this._unheldText, " ", this._endThem);

  private _query = queryLine((query) => (this.view.query = query));
}

const TAIL = 80;
const LOOK_MS = 10_000; // between two requests for meshes of other kernels,
const JOBS_MS = 60_000; // and at jobs, for which schedulers are asked

/** The selection in the tree: facts, buttons, its last lines or its stacks. */
export class SelectedSection extends Section {
  constructor(
    private _actions: Actions,
    private _menu: (x: number, y: number) => void,
    hasCode = true,
  ) {
    super("selected", say`Selected`);
    this._code.hidden = !hasCode;
    for (const action of ACTIONS.filter((candidate) => candidate.button)) {
      const button = h("button", { class: "mnb-b", type: "button", text: phrase(action.label), title: say`${phrase(action.hint)} (${action.key} in the tree)`, onclick: () => void this._act(action) });
      this._buttons.push([action, button]);
    }
    this._more.addEventListener("click", () => {
      const { left, bottom } = this._more.getBoundingClientRect();
      this._menu(left, bottom);
    });
    this._code.addEventListener("click", () => (this.codes = !this.codes));
    this.body.append(h("div", { class: "mnb-buttons" }, ...this._buttons.map(([, button]) => button), this._more, this._code), this._codes, this._facts, this._lines);
  }

  /** Whether the code of each action is listed. */
  get codes(): boolean {
    return !this._codes.hidden;
  }

  set codes(areShown: boolean) {
    this._codes.hidden = !areShown;
    this._code.setAttribute("aria-pressed", String(areShown));
    if (!areShown || !this.cluster) return;
    this._draw(this.cluster);
    void this._actions.learn().then(() => this.cluster && this._draw(this.cluster));
  }

  private async _act(action: Action): Promise<void> {
    const target = this._row && targetOf(this._row);
    if (target) await this._actions.act(action.name, target.uid, target.ranks);
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
      this.label = say`Selected`;
      return () => undefined;
    }
    this.label = say`Selected: ${lookOf(cluster.state, row, cluster.now()).name}`;
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
      setText(this._lines, tail.join("\n") || say`no output yet`);
      if (down) this._lines.scrollTop = this._lines.scrollHeight;
    });
  }

  /** Shows the stacks of some ranks in place of the last lines. */
  async showStacks(uid: string, ranks: number[] | null): Promise<void> {
    const { cluster } = this;
    if (!cluster) return;
    this._stacked = true;
    setText(this._lines, say`asking the processes …`);
    setText(this._lines, await stacksText(cluster, uid, ranks).catch((error: Error) => error.message));
    this._lines.scrollTop = 0;
  }

  private _draw(cluster: Cluster): void {
    const row = this._row;
    if (!row) return;
    const facts = factsOf(cluster.state, row, cluster.now());
    const { uid, ranks } = targetOf(row);
    const on = cluster.live ? this._actions.target(uid, ranks) : null;
    for (const [action, button] of this._buttons) able(button, on !== null && action.applies(on));
    this._buttons.find(([{ name }]) => name === "heal")?.[1].classList.toggle("mnb-main", Boolean(on?.counts.failed) && !on?.mesh.stopped);
    able(this._more, on !== null);
    if (on && this.codes) this._drawCodes(ACTIONS.filter((action) => action.applies(on)), on);
    setFacts(this._facts, facts);
  }

  /** The code of each action, which a click puts into a cell. */
  private _drawCodes(actions: readonly Action[], on: Target): void {
    const codes = actions.map((action): [Action, string] => [action, this._actions.code(action, on)]);
    const key = JSON.stringify(codes.map(([{ name }, code]) => [name, code]));
    if (key === this._listed) return;
    this._listed = key;
    this._codes.replaceChildren(
      ...codes.map(([{ name, label }, code]) =>
        h("li", {}, h("button", { type: "button", title: say`${phrase(label)}: put this code into a cell`, onclick: () => void this._actions.insert(name, on.uid, on.ranks) }, h("span", { class: "mnb-dim", text: phrase(label) }), h("code", { text: code.replace(/\n.*/s, " …") }))),
      ),
    );
  }

  private _buttons: [Action, HTMLButtonElement][] = [];
  private _code = h("button", { class: "mnb-b", type: "button", text: say`Code`, title: say`shows the code of each action; a click puts it into a cell`, "aria-pressed": "false" });
  private _codes = h("ul", { class: "mnb-codes", "aria-label": say`code of the actions`, hidden: true });
  private _facts = h("div", { class: "mnb-facts" });
  private _lines = h("pre", { class: "mnb-lines", tabindex: "0", "aria-label": say`last lines` });
  private _listed = "";
  private _more = h("button", { class: "mnb-b", type: "button", text: say`More`, title: say`everything that can be done to it`, "aria-haspopup": "menu" });
  private _row: Row | null = null;
  private _stacked = false;
}

function able(button: HTMLButtonElement, can: boolean): void {
  if (button.disabled === can) button.disabled = !can;
}

export class FailureSection extends Section {
  constructor() {
    super("failures", say`Failures`);
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

  /** Shows the number of unhealed ones in the title; also while it is closed. */
  count(state: ClusterState): void {
    const open = Object.values(state.failures).filter((failure) => failure.state === "open").length;
    this.label = open ? say`Failures · ${open} not healed` : say`Failures`;
  }
}

/** The reason why nothing progresses, and the slow ranks. */
export class FindingSection extends Section {
  constructor() {
    super("findings", say`Findings`);
  }

  /** Asks for the reason now: of one mesh, or of all active ones. */
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

/** A section about one mesh, which the user picks. */
abstract class PickSection extends Section {
  constructor(id: string, label: string) {
    super(id, label);
    this._pick.addEventListener("change", () => this.follow(this._pick.value, null));
  }

  /** Shows a mesh, or some of its ranks. */
  follow(uid: string, ranks: number[] | null): void {
    this._uid = uid;
    this._ranks = ranks;
    this.again();
  }

  protected abstract draw(cluster: Cluster, root: HTMLElement, mesh: string, ranks: number[] | undefined): () => void;

  protected mount(cluster: Cluster): () => void {
    const root = h("div", { class: "mnb-fill" });
    this.body.append(h("div", { class: "mnb-top" }, h("label", {}, h("span", { class: "mnb-dim", text: say`of ` }), this._pick)), root);
    let end: (() => void) | null = null;
    let shownText = "";
    const draw = (): void => {
      const meshes = Object.entries(cluster.state.meshes).filter(([uid, mesh]) => (!mesh.stopped && !mesh.inner) || uid === this._uid);
      const offered = JSON.stringify(meshes.map(([uid, mesh]) => [uid, mesh.name]));
      if (offered !== this._offered) {
        this._offered = offered;
        this._pick.replaceChildren(...meshes.map(([uid, mesh]) => h("option", { value: uid, text: mesh.name })));
      }
      if (!meshes.some(([uid]) => uid === this._uid)) [this._uid, this._ranks] = [meshes[0]?.[0] ?? "", null];
      this._pick.value = this._uid;
      if (this._uid === shownText) return;
      shownText = this._uid;
      end?.();
      root.replaceChildren();
      end = shownText ? this.draw(cluster, root, shownText, this._ranks ?? undefined) : null;
    };
    const stop = drawing(cluster, (structure) => structure && draw());
    return () => {
      stop();
      end?.();
      this.body.replaceChildren();
    };
  }

  private _offered = "";
  private _pick = h("select", { class: "mnb-pick", "aria-label": say`mesh` });
  private _ranks: number[] | null = null;
  private _uid = "";
}

export class LogSection extends PickSection {
  constructor() {
    super("logs", say`Logs`);
  }

  protected draw(cluster: Cluster, root: HTMLElement, mesh: string, ranks: number[] | undefined): () => void {
    return logView(cluster, root, { mesh, ranks });
  }
}

/** The variables of cells on ranks. */
export class VariableSection extends PickSection {
  constructor() {
    super("variables", say`Variables`);
  }

  protected draw(cluster: Cluster, root: HTMLElement, mesh: string, ranks: number[] | undefined): () => void {
    return variableView(cluster, root, { mesh, ranks });
  }
}

/** Resource use of processes over the last hour. */
export class HistorySection extends PickSection {
  constructor() {
    super("history", say`History`);
  }

  protected draw(cluster: Cluster, root: HTMLElement, mesh: string): () => void {
    return historyView(cluster, root, { mesh });
  }
}

export class DebugSection extends Section {
  /** `area` gives the element in which a prompt may be left. */
  constructor(private _area: () => HTMLElement | null) {
    super("sessions", say`Debugger`);
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

  /** Shows the number of stopped ranks in the title; also while it is closed. */
  count(state: ClusterState): void {
    const stopped = Object.keys(state.sessions).length;
    this.label = stopped ? say`Debugger · ${stopped} stopped` : say`Debugger`;
  }
}

export class TensorSection extends Section {
  constructor() {
    super("tensors", say`Tensors`);
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
    super("transfers", say`Transfers`);
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

/** An item that runs without this kernel: its text, and its buttons. */
interface Left {
  key: string;
  name: string;
  text: string;
  buttons: [label: string, act: () => Promise<void>][];
}

/** A list of such items. Buttons keep the focus while texts change. */
class LeftList {
  constructor(
    heading: string,
    private _empty: string,
  ) {
    this.node = h("div", {}, h("b", { text: heading }), this._list, this._note);
  }

  readonly node: HTMLElement;

  draw(rows: readonly Left[], problem = ""): void {
    setText(this._note, problem || (rows.length ? "" : this._empty));
    const content = JSON.stringify(rows.map(({ key, buttons }) => [key, buttons.map(([label]) => label)]));
    if (content !== this._shown) {
      this._list.replaceChildren(
        ...rows.map(({ name, buttons }, index) =>
          h("li", {}, h("div"), h("div", { class: "mnb-buttons" }, ...buttons.map(([text], nth) => h("button", { class: "mnb-b", type: "button", text, "aria-label": `${text} ${name}`, onclick: () => void this._all[index]?.buttons[nth]?.[1]() })))),
        ),
      );
    }
    this._shown = content;
    this._all = rows;
    rows.forEach(({ text }, position) => setText((this._list.children[position] as Element).children[0] as Element, text));
    this._list.hidden = !rows.length;
  }

  private _all: readonly Left[] = [];
  private _list = h("ul", { class: "mnb-left" });
  private _note = h("div", { class: "mnb-dim" });
  private _shown = "[]";
}

/** Meshes of other kernels and meshes that were left, and jobs; to be attached, or ended. */
export class LeftSection extends Section {
  constructor(private _actions: Actions) {
    super("left", say`Left Running`);
  }

  protected mount(cluster: Cluster): () => void {
    const meshes = new LeftList(say`Meshes`, say`no mesh was left: %detach NAME leaves one, and other kernels' meshes are here, too`);
    const jobs = new LeftList(say`Jobs`, say`no job runs: %mesh NAME --job KIND starts one`);
    this.body.append(meshes.node, jobs.node);
    let ended = false;
    const drawMeshes = async (): Promise<void> => {
      const left = (await cluster.request("left", {}).catch(() => ({ meshes: [] }))).meshes;
      const act = (verb: "attach" | "end", mesh: LeftMesh) => () => this._actions.take(verb, mesh).then(drawMeshes);
      if (!ended) meshes.draw(left.map((mesh) => ({ key: `${mesh.uid} ${mesh.held}`, name: mesh.name, text: mesh.text, buttons: [[mesh.held ? say`Take over` : say`Attach`, act("attach", mesh)], [say`Stop`, act("end", mesh)]] })));
    };
    const drawJobs = async (): Promise<void> => {
      const { jobs: found, text = "" } = await cluster.request("jobs", {}).catch((error: Error) => ({ jobs: [], text: error.message }));
      const use = (job: RunningJob): Left["buttons"] => (job.here ? [] : [[say`Attach`, () => this._actions.useJob(job)]]);
      if (!ended) jobs.draw(found.map((job) => ({ key: job.id, name: job.label, text: job.here ? say`${job.text} · used here` : job.text, buttons: [...use(job), [say`Stop`, () => this._actions.endJob(job).then(drawJobs)]] })), text);
    };
    void drawMeshes();
    void drawJobs();
    const unwatch = cluster.watch((patch) => isStructural(patch) && void drawMeshes());
    const looking = [setInterval(() => void drawMeshes(), LOOK_MS), setInterval(() => void drawJobs(), JOBS_MS)];
    return () => {
      ended = true;
      unwatch();
      looking.forEach(clearInterval);
      this.body.replaceChildren();
    };
  }
}

/** The activity of ranks: the newest timeline, or a new one. */
export class TimelineSection extends Section {
  constructor() {
    super("timeline", say`Timeline`);
  }

  /** Records ranks from now on. Rejects with the reason of a failure. */
  async record(mesh: string, ranks: number[] | null): Promise<void> {
    if (!this.cluster) return;
    const { key } = await this.cluster.request("timeline", { do: "begin", mesh, ...(ranks && { ranks }) });
    if (key === this._options.key) return;
    this._options = { key };
    const keys = this.body.contains(document.activeElement);
    this.again();
    if (keys) this.focus(); // the focused element is gone
  }

  protected mount(cluster: Cluster): () => void {
    const root = h("div");
    this.body.append(root);
    const end = timelineView(cluster, root, this._options);
    return () => {
      end();
      root.remove();
    };
  }

  private _options: TimelineOptions = {};
}
