// Asks for the name and the shape of a new mesh.

import { Dialog, showDialog } from "@jupyterlab/apputils";
import { Widget } from "@lumino/widgets";

import { NewMesh, codeForSpawn, freshName, newMeshFrom } from "./code";
import type { ClusterState } from "../cluster/state";
import { h, setText } from "../page/dom";

class Form extends Widget implements Dialog.IBodyWidget<NewMesh | string> {
  constructor(private _state: ClusterState, typed: [string, string] | null) {
    super();
    this.addClass("mnb-form");
    const taken = Object.values(_state.meshes).filter((mesh) => !mesh.stopped).map((mesh) => mesh.name);
    [this._name.value, this._dims.value] = typed ?? [freshName(taken), "gpus=4"];
    this.node.append(h("label", {}, "Name", this._name), h("label", {}, "Shape", this._dims), this._code, this._note);
    for (const field of [this._name, this._dims]) field.addEventListener("input", () => this._update());
    this._update();
  }

  get typed(): [string, string] {
    return [this._name.value, this._dims.value];
  }

  getValue(): NewMesh | string {
    return newMeshFrom(this._name.value.trim(), this._dims.value);
  }

  private _update(): void {
    const mesh = this.getValue();
    const wrong = typeof mesh === "string";
    setText(this._code, wrong ? "" : codeForSpawn(mesh.name, mesh.dims));
    const taken = !wrong && Object.values(this._state.meshes).some((other) => other.name === mesh.name && !other.stopped);
    setText(this._note, wrong ? mesh : taken ? `${mesh.name} is running. The same shape keeps it; another shape replaces it, and its actors are lost.` : "");
    this._note.classList.toggle("mnb-wrong", wrong || taken);
  }

  private _name = h("input", { class: "jp-mod-styled", "aria-label": "name", spellcheck: "false" });
  private _dims = h("input", { class: "jp-mod-styled", "aria-label": "shape", placeholder: "hosts=2 gpus=4", spellcheck: "false" });
  private _code = h("code");
  private _note = h("div", { class: "mnb-form-note", role: "status" });
}

/** Asks until it can be done or is given up: null. */
export async function askForMesh(state: ClusterState, typed: [string, string] | null = null): Promise<NewMesh | null> {
  const body = new Form(state, typed);
  const answer = await showDialog({ title: "Spawn a mesh", body, buttons: [Dialog.cancelButton(), Dialog.okButton({ label: "Spawn" })], focusNodeSelector: "input" });
  if (!answer.button.accept) return null;
  return typeof answer.value === "string" || !answer.value ? askForMesh(state, body.typed) : answer.value;
}
