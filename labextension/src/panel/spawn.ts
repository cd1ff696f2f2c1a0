// Asks for a new mesh: its name, its place, shape and set-up; shows a preview, and the cell that makes it.

import type { Place } from "../cluster/messages";
import type { ClusterState } from "../cluster/state";
import type { Dialogs } from "../page/dialogs";
import { h, setText } from "../page/dom";
import { plural } from "../page/words";
import { say } from "../page/language";
import { type Dims, type NewMesh, codeForMesh, dimsText, freshName, newMeshFrom } from "./code";

const KEPT = "monarch-nb:spawned";
const MOST_KEPT = 5;
const DRAWN = 8; // hosts, and processes of each

type Recent = Pick<NewMesh, "job" | "arguments"> & { dims: string };

/** Earlier choices, the latest first, as stored by this browser. */
function recent(): Recent[] {
  try {
    return JSON.parse(localStorage.getItem(KEPT) ?? "[]") as Recent[];
  } catch {
    return [];
  }
}

function keep({ job, arguments: given, dims }: NewMesh): void {
  const choice = { job, arguments: given, dims: dimsText(dims) };
  const earlier = recent().filter((entry) => JSON.stringify(entry) !== JSON.stringify(choice));
  try {
    localStorage.setItem(KEPT, JSON.stringify([choice, ...earlier].slice(0, MOST_KEPT)));
  } catch {
    // A page without storage proposes the defaults.
  }
}

/** The number of hosts of a job for a mesh: of that name, or its only ones; undefined if the request decides. */
export function hostsFor(place: Place | undefined, name: string): number | undefined {
  const sizes = Object.values(place?.hosts ?? {});
  return place?.hosts[name] ?? (sizes.length === 1 ? sizes[0] : undefined);
}

/** The reason why a mesh cannot be made on the hosts of a job; "" if it can. */
export function wrongHosts(place: Place | undefined, { name, dims }: Pick<NewMesh, "name" | "dims">): string {
  if (!place || !Object.keys(place.hosts).length) return "";
  const has = hostsFor(place, name);
  if (has === undefined) return say`${place.name} has hosts for ${Object.keys(place.hosts).join(" and ")}: give the mesh one of these names.`;
  return dims.hosts === undefined || dims.hosts === has ? "" : say`${place.name} has ${plural(has, "host")} for ${name}: leave hosts= out.`;
}

/** `8 processes on 2 hosts`, and the numbers that are drawn for each host. `has`: the hosts of a job. */
export function previewOf(dims: Dims, has?: number): { text: string; hosts: number[] } {
  const hosts = has ?? dims.hosts ?? 1;
  const perHost = Object.entries(dims).reduce((product, [label, size]) => (label === "hosts" ? product : product * size), 1);
  const text = `${plural(hosts * perHost, "process", "processes")}${hosts > 1 ? ` on ${plural(hosts, "host")}` : ""}`;
  return { text, hosts: Array.from({ length: Math.min(hosts, DRAWN) }, () => Math.min(perHost, DRAWN)) };
}

export class SpawnForm {
  readonly node = h("div", { class: "mnb-form" });

  constructor(
    private _state: ClusterState,
    private _places: readonly Place[],
    typed: Partial<NewMesh & { shape: string }> | null,
    writes = true,
  ) {
    const names = Object.values(_state.meshes).filter((mesh) => !mesh.stopped).map((mesh) => mesh.name);
    const [last] = recent();
    const usable = [..._places].sort((a, b) => Number(Boolean(a.why)) - Number(Boolean(b.why)));
    this._where.append(h("option", { value: "", text: say`this machine` }), ...usable.map(({ name, text, why }) => h("option", { value: name, disabled: Boolean(why), text: why ? `${text}: ${why}` : text })));
    this._name.value = typed?.name ?? freshName(names);
    this._dims.value = typed?.shape ?? last?.dims ?? "gpus=4";
    const job = typed?.job ?? last?.job ?? "";
    this._where.value = usable.some(({ name, why }) => name === job && !why) ? job : "";
    this._arguments.value = typed?.arguments ?? last?.arguments ?? "";
    this._setup.value = typed?.setup ?? "";
    this._inCell.checked = typed?.inCell ?? writes;
    const shapes = h("datalist", { id: "mnb-shapes" }, ...[...new Set(recent().map(({ dims }) => dims))].map((value) => h("option", { value })));
    this._options = h("label", {}, say`Options`, this._arguments);
    this.node.append(
      h("label", {}, say`Name`, this._name),
      h("label", {}, say`Where`, this._where),
      h("label", {}, say`Shape`, this._dims),
      this._options,
      h("label", {}, say`Set-up`, this._setup),
      shapes,
      this._preview,
      this._drawing,
      this._code,
      h("label", { class: "mnb-form-cell" }, this._inCell, writes ? say`write this cell into the notebook and run it` : say`show this cell to be copied, and make nothing`),
      this._note,
    );
    for (const field of [this._name, this._dims, this._where, this._arguments, this._setup, this._inCell]) field.addEventListener("input", () => this._update());
    this._update();
  }

  get typed(): Partial<NewMesh & { shape: string }> {
    return { name: this._name.value, shape: this._dims.value, job: this._where.value, arguments: this._arguments.value, setup: this._setup.value, inCell: this._inCell.checked };
  }

  getValue(): NewMesh | string {
    const mesh = newMeshFrom(this._name.value.trim(), this._dims.value);
    if (typeof mesh === "string") return mesh;
    const refused = wrongHosts(this._place, mesh);
    if (refused) return refused;
    const job = this._where.value;
    const setup = this._setup.value.trimEnd();
    return { ...mesh, job, arguments: this._takesOptions ? this._arguments.value.trim() : "", setup, inCell: this._inCell.checked || Boolean(job || setup) };
  }

  private get _place(): Place | undefined {
    return this._places.find(({ name }) => name === this._where.value);
  }

  /** Jobs with hosts already have their options. */
  private get _takesOptions(): boolean {
    return Boolean(this._where.value && !Object.keys(this._place?.hosts ?? {}).length);
  }

  private _update(): void {
    const mesh = this.getValue();
    const wrong = typeof mesh === "string";
    this._options.hidden = !this._takesOptions;
    this._inCell.disabled = Boolean(this._where.value || this._setup.value.trim()); // since the cell shows how hosts join
    const preview = wrong ? { text: "", hosts: [] } : previewOf(mesh.dims, hostsFor(this._place, mesh.name));
    setText(this._preview, preview.text);
    this._drawing.replaceChildren(...preview.hosts.map((count) => h("div", {}, ...Array.from({ length: count }, () => h("i")))));
    setText(this._code, wrong ? "" : codeForMesh(mesh));
    const isTaken = !wrong && Object.values(this._state.meshes).some((existing) => existing.name === mesh.name && !existing.stopped);
    setText(this._note, wrong ? mesh : isTaken ? say`${mesh.name} is running. The same shape keeps it; another shape replaces it, and its actors are lost.` : "");
    this._note.classList.toggle("mnb-wrong", wrong || isTaken);
  }

  private _arguments = h("input", { class: "jp-mod-styled", "aria-label": say`options of the job`, placeholder: "partition=gpu time=1:00:00", spellcheck: "false" });
  private _code = h("pre", { tabindex: "0", "aria-label": say`cell` });
  private _dims = h("input", { class: "jp-mod-styled", "aria-label": say`shape`, list: "mnb-shapes", placeholder: "hosts=2 gpus=4", spellcheck: "false" });
  private _drawing = h("div", { class: "mnb-form-drawing", "aria-hidden": "true" });
  private _inCell = h("input", { type: "checkbox" });
  private _name = h("input", { class: "jp-mod-styled", "aria-label": say`name`, spellcheck: "false" });
  private _note = h("div", { class: "mnb-form-note", role: "status" });
  private _options: HTMLElement;
  private _preview = h("div", { class: "mnb-dim" });
  private _setup = h("textarea", { class: "jp-mod-styled", "aria-label": say`set-up`, rows: "2", placeholder: say`import torch  # what each process runs first`, spellcheck: "false" });
  private _where = h("select", { "aria-label": say`where` });
}

/** Asks until the input is valid, or cancelled: null. `writes`: the page can write cells. */
export async function askForMesh(dialogs: Dialogs, state: ClusterState, places: readonly Place[], writes: boolean, typed: SpawnForm["typed"] | null = null): Promise<NewMesh | null> {
  const form = new SpawnForm(state, places, typed, writes);
  if (!(await dialogs.fill(say`Spawn a mesh`, form.node, say`Spawn`))) return null;
  const mesh = form.getValue();
  if (typeof mesh === "string") return askForMesh(dialogs, state, places, writes, form.typed);
  keep(mesh);
  return mesh;
}
