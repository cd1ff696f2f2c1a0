// What can be done to the cluster by a click or a command: asks before something is lost, and reports the result.

import { Dialog, InputDialog, showDialog } from "@jupyterlab/apputils";
import { ISignal, Signal } from "@lumino/signaling";
import { Widget } from "@lumino/widgets";

import { phrase, say } from "../page/language";
import { Dims, NewMesh, Variables, codeForMesh, codeForSpawn } from "./code";
import type { LeftMesh, RunningJob } from "../cluster/messages";
import type { Connection } from "./connection";
import { askForMesh } from "./spawn";
import { ACTIONS, Action, Part, Target, targetAt, words } from "./table";

/** What came of a click; `code` is what a cell needs to do the same. */
export interface Outcome {
  text: string;
  wrong: boolean;
  code: string;
}

/** What the panel and the notebook in front do for actions. */
export interface Page {
  show(what: Part, on: Target): void;
  /** The source of the active cell. */
  cell(): string;
  insert(code: string): void;
  /** Puts code into a cell below the active one, and runs it. */
  run(code: string): void;
}

const gone = (): string => say`That mesh has been stopped, or belongs to another notebook.`;

export class Actions {
  outcome: Outcome = { text: "", wrong: false, code: "" };
  /** What names the notebook has for meshes, as last seen. */
  variables: Variables = {};

  constructor(
    private _connection: () => Connection | null,
    private _page: Page,
    private _done: (outcome: Outcome) => void,
  ) {}

  /** Something was done, or was not. */
  get changed(): ISignal<this, Outcome> {
    return this._changed;
  }

  report(text: string, wrong = false, code = ""): void {
    this._show({ text, wrong, code });
    if (text && !wrong) this._done(this.outcome);
  }

  clear(): void {
    this._show({ text: "", wrong: false, code: "" });
  }

  target(uid: string, ranks: number[] | null): Target | null {
    const state = this._connection()?.cluster.state;
    return state ? targetAt(state, uid, ranks, this.variables) : null;
  }

  /** The code of an action, with what is in the active cell, or what it proposes, as what is typed. */
  code(action: Action, on: Target): string {
    return action.code(on, action.asks?.proposes(on) ?? codeOfCell(this._page.cell()));
  }

  /** Asks the kernel for the names of meshes. */
  async learn(): Promise<void> {
    try {
      this.variables = (await this._connection()?.cluster.request("variables", {}))?.variables ?? {};
    } catch {
      this.variables = {};
    }
  }

  /** Puts the code of an action into a cell. */
  async insert(name: string, uid: string, ranks: number[] | null): Promise<void> {
    await this.learn();
    const on = this.target(uid, ranks);
    const action = named(name);
    if (!on) return this.report(gone(), true);
    const code = this.code(action, on);
    this._page.insert(code);
    this._show({ text: say`the code of “${phrase(action.label)}” is in a cell`, wrong: false, code: "" });
  }

  /** Acts on a mesh or some of its ranks; asks nothing where somebody is `sure`. */
  async act(name: string, uid: string, ranks: number[] | null, sure = false): Promise<void> {
    const connection = this._connection();
    const on = this.target(uid, ranks);
    if (!connection || !on) return this.report(gone(), true);
    const action = named(name);
    const typed = action.asks ? await ask(phrase(action.asks.title), action.asks.proposes(on), phrase(action.asks.example)) : "";
    if (typed === null || (!sure && !(await agreed(action, on)))) return;
    const { does } = action;
    if ("shows" in does) return this._page.show(does.shows, on);
    await this.learn();
    const code = action.code(this.target(uid, ranks) ?? on, typed || codeOfCell(this._page.cell()));
    if ("runs" in does) {
      this._page.run(code);
      return this._show({ text: say`the cell runs on ${on.place}`, wrong: false, code: "" });
    }
    this._show({ text: `${phrase(does.waiting)} ${on.mesh.name} …`, wrong: false, code: "" });
    try {
      const result = (await connection.cluster.request(does.verb, { mesh: uid, ...(ranks === null ? {} : { ranks }), ...does.more?.(typed) } as never)) as { text?: string };
      this.report(result.text ?? "", false, code);
    } catch (error) {
      this.report((error as Error).message, true);
    }
  }

  /** Attaches a mesh that is not of this kernel, or stops it. */
  async take(verb: "attach" | "end", { uid, name, held }: LeftMesh): Promise<void> {
    const cluster = this._connection()?.cluster;
    if (!cluster) return;
    const label = verb === "end" ? say`Stop` : say`Take Over`;
    const lost = verb === "end" ? say`Its processes end, with all that is on them.` : say`The kernel that has it loses it, and is notified.`;
    if ((verb === "end" || held) && !(await agreedTo(`${label} ${name}?`, lost, label))) return;
    this._show({ text: verb === "end" ? say`stopping ${name} …` : say`attaching ${name} …`, wrong: false, code: "" });
    try {
      const { text } = await cluster.request(verb, { uid, steal: held });
      this.report(text ?? "", false, verb === "end" ? `!monarch-nb mesh stop ${name}${held ? " --steal" : ""}` : `%attach ${name}${held ? " --steal" : ""}`);
    } catch (error) {
      this.report((error as Error).message, true);
    }
  }

  /** Asks for a mesh on the hosts of a job that runs. */
  async useJob({ id, label, hosts }: RunningJob): Promise<void> {
    const cluster = this._connection()?.cluster;
    if (!cluster) return;
    const name = id.slice(0, 8);
    const place = { name, text: say`job ${label}, which runs`, why: "", hosts };
    this._make(await askForMesh(cluster.state, [place], { job: name, name: Object.keys(hosts)[0] ?? "" }));
  }

  /** Ends a job, with its hosts. */
  async endJob({ id, label }: RunningJob): Promise<void> {
    const cluster = this._connection()?.cluster;
    if (!cluster || !(await agreedTo(say`Stop the job ${label}?`, say`Its hosts end, with all that runs on them.`, say`Stop`))) return;
    this._show({ text: say`stopping the job ${label} …`, wrong: false, code: "" });
    try {
      const { text } = await cluster.request("end_job", { job: id });
      this.report(text ?? "", false, `!monarch-nb job kill ${id.slice(0, 8)}`);
    } catch (error) {
      this.report((error as Error).message, true);
    }
  }

  /** Heals all that has failed. */
  async healAll(): Promise<void> {
    const state = this._connection()?.cluster.state;
    const failed = Object.entries(state?.meshes ?? {}).filter(([, mesh]) => !mesh.stopped && mesh.counts?.failed);
    const roots = failed.filter(([, mesh]) => mesh.kind === "procs" || !failed.some(([other]) => other === mesh.on));
    if (!roots.length) this.report(say`Nothing has failed, so there is nothing to heal.`);
    for (const [uid] of roots) await this.act("heal", uid, null);
  }

  /** Spawns a mesh; asks for its name and shape where they are not given. */
  async spawn(name?: string, dims?: Dims): Promise<void> {
    const connection = this._connection();
    if (!connection) return;
    const asked = name && dims ? null : await this._askForMesh(connection);
    if (this._make(asked)) return;
    const mesh = asked ? { name: asked.name, dims: asked.dims } : name && dims ? { name, dims } : null;
    if (!mesh) return;
    this._show({ text: say`spawning ${mesh.name} …`, wrong: false, code: "" });
    try {
      const result = await connection.cluster.request("spawn", mesh);
      this.report(result.text ?? "", false, codeForSpawn(mesh.name, mesh.dims));
    } catch (error) {
      this.report((error as Error).message, true);
    }
  }

  /** Makes a mesh by a cell, where that is wanted. */
  private _make(asked: NewMesh | null): boolean {
    if (!asked?.inCell) return false;
    this._page.run(codeForMesh(asked));
    this._show({ text: say`the cell makes ${asked.name}`, wrong: false, code: "" });
    return true;
  }

  private async _askForMesh({ cluster }: Connection): Promise<NewMesh | null> {
    const { places } = await cluster.request("places", {}).catch(() => ({ places: [] }));
    return askForMesh(cluster.state, places);
  }

  private _show(outcome: Outcome): void {
    this.outcome = outcome;
    this._changed.emit(outcome);
  }

  private _changed = new Signal<this, Outcome>(this);
}

function named(name: string): Action {
  const action = ACTIONS.find((each) => each.name === name);
  if (!action) throw new Error(say`there is no action ${name}`);
  return action;
}

/** The source of a cell without a line that says where it runs. */
function codeOfCell(source: string): string {
  return source.replace(/^\s*%%on\b.*\n?/, "").trimEnd();
}

async function agreed(action: Action, on: Target): Promise<boolean> {
  const lost = action.loses?.(on);
  const label = phrase(action.label);
  return !lost || agreedTo(action.label.includes(" Host") ? say`${label} of ${words(on)}?` : `${label} ${words(on)}?`, lost, label);
}

/** Asks whether something may be lost. */
async function agreedTo(title: string, lost: string, label: string): Promise<boolean> {
  const body = new Widget();
  body.node.textContent = lost;
  const answer = await showDialog({ title, body, buttons: [Dialog.cancelButton(), Dialog.warnButton({ label })], defaultButton: 0 });
  return answer.button.accept;
}

/** What is typed; null where nothing is. */
async function ask(title: string, text: string, placeholder: string): Promise<string | null> {
  const answer = await InputDialog.getText({ title, text, placeholder, label: placeholder, selectionRange: 0 });
  const typed = answer.button.accept ? (answer.value ?? "").trim() : "";
  return typed || null;
}
