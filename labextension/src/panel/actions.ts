// What can be done to the cluster by a click or a command: asks before something is lost, and reports the result.

import { Dialog, showDialog } from "@jupyterlab/apputils";
import { ISignal, Signal } from "@lumino/signaling";
import { Widget } from "@lumino/widgets";

import { Dims, Variables, codeFor, codeForSpawn } from "./code";
import type { Connection } from "./connection";
import { sizeOf } from "../cluster/ranks";
import { plural } from "../page/words";
import { askForMesh } from "./spawn";
import { countsAt } from "./tree";

/** What came of a click; `code` is a line for the notebook that does the same. */
export interface Outcome {
  text: string;
  wrong: boolean;
  code: string;
}

export type Verb = "heal" | "stop" | "interrupt";

export class Actions {
  outcome: Outcome = { text: "", wrong: false, code: "" };

  constructor(
    private _connection: () => Connection | null,
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

  /** Heals, stops or interrupts a mesh or some of its ranks; asks nothing where somebody is `sure`. */
  async act(verb: Verb, uid: string, ranks: number[] | null, sure = false): Promise<void> {
    const connection = this._connection();
    const mesh = connection?.cluster.state.meshes[uid];
    if (!connection || !mesh) {
      this.report("That mesh has been stopped, or belongs to another notebook.", true);
      return;
    }
    if (!sure && !(await this._sure(connection, verb, uid, ranks))) return;
    const waiting = { heal: "healing", stop: "stopping", interrupt: "interrupting" }[verb];
    this._show({ text: `${waiting} ${mesh.name} …`, wrong: false, code: "" });
    try {
      const variables = await this._variables(connection);
      const result = await connection.cluster.request(verb, ranks === null ? { mesh: uid } : { mesh: uid, ranks });
      this.report(result.text ?? "", false, codeFor(verb, mesh, uid, ranks, variables));
    } catch (error) {
      this.report((error as Error).message, true);
    }
  }

  /** Heals all that has failed. */
  async healAll(): Promise<void> {
    const state = this._connection()?.cluster.state;
    const failed = Object.entries(state?.meshes ?? {}).filter(([, mesh]) => !mesh.stopped && mesh.counts?.failed);
    const roots = failed.filter(([, mesh]) => mesh.kind === "procs" || !failed.some(([other]) => other === mesh.on));
    if (!roots.length) this.report("Nothing has failed, so there is nothing to heal.");
    for (const [uid] of roots) await this.act("heal", uid, null);
  }

  /** Spawns a mesh; asks for its name and shape where they are not given. */
  async spawn(name?: string, dims?: Dims): Promise<void> {
    const connection = this._connection();
    if (!connection) return;
    const mesh = name && dims ? { name, dims } : await askForMesh(connection.cluster.state);
    if (!mesh) return;
    this._show({ text: `spawning ${mesh.name} …`, wrong: false, code: "" });
    try {
      const result = await connection.cluster.request("spawn", mesh);
      this.report(result.text ?? "", false, codeForSpawn(mesh.name, mesh.dims));
    } catch (error) {
      this.report((error as Error).message, true);
    }
  }

  private _show(outcome: Outcome): void {
    this.outcome = outcome;
    this._changed.emit(outcome);
  }

  private async _variables(connection: Connection): Promise<Variables> {
    try {
      return (await connection.cluster.request("variables", {})).variables;
    } catch {
      return {};
    }
  }

  private async _sure(connection: Connection, verb: Verb, uid: string, ranks: number[] | null): Promise<boolean> {
    const { state } = connection.cluster;
    const mesh = state.meshes[uid];
    if (!mesh || verb === "heal") return true;
    const counts = countsAt(state, uid, ranks);
    const count = ranks?.length ?? sizeOf(mesh);
    const busy = counts.busy ?? 0;
    if (verb === "interrupt" && busy < 2) return true;
    const what = ranks === null ? mesh.name : `${plural(count, "rank")} of ${mesh.name}`;
    const lost =
      verb === "interrupt"
        ? `Running code on ${plural(busy, "rank")} ends with KeyboardInterrupt.`
        : [
            mesh.kind === "actors" ? "The actors and what they hold are lost." : "The processes end; the actors on them and what they hold are lost.",
            busy ? `${plural(busy, "rank")} ${busy === 1 ? "is" : "are"} busy.` : "",
          ].join(" ");
    const body = new Widget();
    body.node.textContent = lost;
    const label = verb === "stop" ? "Stop" : "Interrupt";
    const answer = await showDialog({ title: `${label} ${what}?`, body, buttons: [Dialog.cancelButton(), Dialog.warnButton({ label })], defaultButton: 0 });
    return answer.button.accept;
  }

  private _changed = new Signal<this, Outcome>(this);
}
