// JupyterLab's dialogs, for the panel.

import { Dialog, InputDialog, showDialog } from "@jupyterlab/apputils";
import { Widget } from "@lumino/widgets";

import type { Dialogs } from "../page/dialogs";
import { h } from "../page/dom";

export const labDialogs: Dialogs = {
  async agree(title, lost, label) {
    const body = new Widget({ node: h("div", { text: lost }) });
    const answer = await showDialog({ title, body, buttons: [Dialog.cancelButton(), Dialog.warnButton({ label })], defaultButton: 0 });
    return answer.button.accept;
  },
  async type(title, text, placeholder) {
    const answer = await InputDialog.getText({ title, text, placeholder, label: placeholder, selectionRange: 0 });
    const typed = answer.button.accept ? (answer.value ?? "").trim() : "";
    return typed || null;
  },
  async fill(title, form, label) {
    const answer = await showDialog({ title, body: new Widget({ node: form }), buttons: [Dialog.cancelButton(), Dialog.okButton({ label })], focusNodeSelector: "input" });
    return answer.button.accept;
  },
};
