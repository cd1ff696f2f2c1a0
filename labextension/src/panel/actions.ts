// Actions on the cluster by a click or a command: ask before a loss, and report the result.

import type { Cluster } from "../cluster/client";
import type { LeftMesh, RunningJob } from "../cluster/messages";
import type { Dialogs } from "../page/dialogs";
import { phrase, say } from "../page/language";
import { type Dims, type NewMesh, type Variables, codeForMesh, codeForSpawn } from "./code";
import { askForMesh } from "./spawn";
import { ACTIONS, type Action, type Part, type Target, targetAt, words } from "./table";

/** The outcome of a click; `code` is the code with which a cell does the same. */
export interface Outcome {
  text: string;
  wrong: boolean;
  code: string;
}

/** The services of the surrounding page for actions: the panel and the notebook in front, or a display in a cell. */
export interface Page {
  show(what: Part, on: Target): Promise<void>;
  /** The source of the active cell; "" if unknown. */
  cell(): string;
  /** Whether the page can write cells. */
  writes(): boolean;
  /** Puts code into a cell below the active one, and with `run` runs it; false where it cannot. */
  write(code: string, run: boolean): boolean;
}

const missing = (): string => say`That mesh has been stopped, or belongs to another notebook.`;

export class Actions {
  outcome: Outcome = { text: "", wrong: false, code: "" };
  /** The notebook's names of meshes, as last fetched. */
  variables: Variables = {};
  /** Called with each outcome, and when something begins. */
  changed: (outcome: Outcome) => void = () => undefined;

  constructor(
    private _cluster: () => Cluster | null,
    private _page: Page,
    private _dialogs: Dialogs,
    private _done: (code: string) => void = () => undefined,
  ) {}

  /** Reports an outcome; "" for none. */
  report(text: string, wrong = false, code = ""): void {
    this.outcome = { text, wrong, code };
    this.changed(this.outcome);
    if (code) this._done(code);
  }

  target(uid: string, ranks: number[] | null): Target | null {
    const state = this._cluster()?.state;
    return state ? targetAt(state, uid, ranks, this.variables) : null;
  }

  /** The code of an action, with what is in the active cell, or what it proposes, as what is typed. */
  code(action: Action, on: Target): string {
    return action.code(on, action.asks?.proposes(on) ?? codeOfCell(this._page.cell()));
  }

  /** Asks the kernel for the names of meshes. */
  async learn(): Promise<void> {
    try {
      this.variables = (await this._cluster()?.request("variables", {}))?.variables ?? {};
    } catch {
      this.variables = {};
    }
  }

  /** Puts the code of an action into a cell. */
  async insert(name: string, uid: string, ranks: number[] | null): Promise<void> {
    await this.learn();
    const on = this.target(uid, ranks);
    const action = named(name);
    if (!on) return this.report(missing(), true);
    const typed = await this._typed(action, on);
    if (typed === null) return;
    const code = action.code(on, typed || codeOfCell(this._page.cell()));
    if (!this._page.write(code, false)) return this.report(say`the code of “${phrase(action.label)}”`, false, code);
    this.report(say`the code of “${phrase(action.label)}” is in a cell`);
  }

  /** Acts on a mesh or some of its ranks; asks nothing if `sure`. */
  async act(name: string, uid: string, ranks: number[] | null, sure = false): Promise<void> {
    const cluster = this._cluster();
    const on = this.target(uid, ranks);
    if (!cluster || !on) return this.report(missing(), true);
    const action = named(name);
    const typed = await this._typed(action, on);
    if (typed === null || (!sure && !(await this._agreed(action, on)))) return;
    const { does } = action;
    try {
      if ("shows" in does) return await this._page.show(does.shows, on);
      await this.learn();
      const code = action.code(this.target(uid, ranks) ?? on, typed || codeOfCell(this._page.cell()));
      if ("runs" in does) return this._write(code, say`the cell runs on ${on.place}`);
      this.report(`${phrase(does.waiting)} ${on.mesh.name} …`);
      const result = (await cluster.request(does.verb, { mesh: uid, ...(ranks === null ? {} : { ranks }), ...does.more?.(typed) } as never)) as { text?: string };
      this.report(result.text ?? "", false, code);
      if (does.then) await this._page.show(does.then, on);
    } catch (error) {
      this.report((error as Error).message, true);
    }
  }

  /** Attaches a mesh that is not of this kernel, or stops it. */
  async take(verb: "attach" | "end", { uid, name, held }: LeftMesh): Promise<void> {
    const cluster = this._cluster();
    if (!cluster) return;
    const label = verb === "end" ? say`Stop` : say`Take Over`;
    const lost = verb === "end" ? say`Its processes end, with all that is on them.` : say`The kernel that has it loses it, and is notified.`;
    if ((verb === "end" || held) && !(await this._dialogs.agree(`${label} ${name}?`, lost, label))) return;
    this.report(verb === "end" ? say`stopping ${name} …` : say`attaching ${name} …`);
    try {
      const { text } = await cluster.request(verb, { uid, steal: held });
      this.report(text ?? "", false, verb === "end" ? `!monarch-nb mesh stop ${name}${held ? " --steal" : ""}` : `%attach ${name}${held ? " --steal" : ""}`);
    } catch (error) {
      this.report((error as Error).message, true);
    }
  }

  /** Asks for a mesh on the hosts of a running job. */
  async useJob({ id, label, hosts }: RunningJob): Promise<void> {
    const cluster = this._cluster();
    if (!cluster) return;
    const name = id.slice(0, 8);
    const place = { name, text: say`job ${label}, which runs`, why: "", hosts };
    this._make(await askForMesh(this._dialogs, cluster.state, [place], this._page.writes(), { job: name, name: Object.keys(hosts)[0] ?? "" }));
  }

  /** Ends a job, with its hosts. */
  async endJob({ id, label }: RunningJob): Promise<void> {
    const cluster = this._cluster();
    if (!cluster || !(await this._dialogs.agree(say`Stop the job ${label}?`, say`Its hosts end, with all that runs on them.`, say`Stop`))) return;
    this.report(say`stopping the job ${label} …`);
    try {
      const { text } = await cluster.request("end_job", { job: id });
      this.report(text ?? "", false, `!monarch-nb job kill ${id.slice(0, 8)}`);
    } catch (error) {
      this.report((error as Error).message, true);
    }
  }

  /** Heals all failed meshes. */
  async healAll(): Promise<void> {
    const state = this._cluster()?.state;
    const failed = Object.entries(state?.meshes ?? {}).filter(([, mesh]) => !mesh.stopped && mesh.counts?.failed);
    const roots = failed.filter(([, mesh]) => mesh.kind === "procs" || !failed.some(([procs]) => procs === mesh.on));
    if (!roots.length) this.report(say`Nothing has failed, so there is nothing to heal.`);
    for (const [uid] of roots) await this.act("heal", uid, null);
  }

  /** Spawns a mesh; asks for its name and shape if they are not given. */
  async spawn(name?: string, dims?: Dims): Promise<void> {
    const cluster = this._cluster();
    if (!cluster) return;
    const request = name && dims ? null : await this._askForMesh(cluster);
    if (this._make(request)) return;
    const mesh = request ? { name: request.name, dims: request.dims } : name && dims ? { name, dims } : null;
    if (!mesh) return;
    this.report(say`spawning ${mesh.name} …`);
    try {
      const result = await cluster.request("spawn", mesh);
      this.report(result.text ?? "", false, codeForSpawn(mesh.name, mesh.dims));
    } catch (error) {
      this.report((error as Error).message, true);
    }
  }

  /** Makes a mesh by a cell, where that is wanted. */
  private _make(newMesh: NewMesh | null): boolean {
    if (!newMesh?.inCell) return false;
    this._write(codeForMesh(newMesh), say`the cell makes ${newMesh.name}`);
    return true;
  }

  private async _askForMesh(cluster: Cluster): Promise<NewMesh | null> {
    const { places } = await cluster.request("places", {}).catch(() => ({ places: [] }));
    return askForMesh(this._dialogs, cluster.state, places, this._page.writes());
  }

  /** The typed input of an action, "" without any; null if cancelled. */
  private async _typed({ asks }: Action, on: Target): Promise<string | null> {
    return asks ? this._dialogs.type(phrase(asks.title), asks.proposes(on), phrase(asks.example)) : "";
  }

  private async _agreed(action: Action, on: Target): Promise<boolean> {
    const lost = action.loses?.(on);
    const label = phrase(action.label);
    return !lost || this._dialogs.agree(action.label.includes(" Host") ? say`${label} of ${words(on)}?` : `${label} ${words(on)}?`, lost, label);
  }

  /** Runs code in a cell, or offers it for copying. */
  private _write(code: string, written: string): void {
    if (this._page.write(code, true)) this.report(written);
    else this.report(say`this does it, in a cell`, false, code);
  }
}

function named(name: string): Action {
  const action = ACTIONS.find((candidate) => candidate.name === name);
  if (!action) throw new Error(say`there is no action ${name}`);
  return action;
}

/** The source of a cell without a line that says where it runs. */
function codeOfCell(source: string): string {
  return source.replace(/^\s*%%on\b.*\n?/, "").trimEnd();
}
