// What anywidget loads: one module for all views.

import { clusterOf } from "./cluster.js";
import { meshView } from "./mesh.js";

const VIEWS = { mesh: meshView };

function render({ model, el }) {
  const root = document.createElement("div");
  root.className = "mnb-v";
  el.append(root);
  const view = VIEWS[model.get("view")];
  const end = view(clusterOf(model), root, model.get("options") ?? {});
  return () => {
    end();
    root.remove();
  };
}

export default { render };
