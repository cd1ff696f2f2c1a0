// What anywidget loads: one module for all views.

import { clusterOf } from "./cluster.js";
import { debugView } from "./debugger.js";
import { failureView } from "./failures.js";
import { logView } from "./logs.js";
import { meshView } from "./mesh.js";
import { metricView } from "./metrics.js";

const VIEWS = { mesh: meshView, failures: failureView, logs: logView, metrics: metricView, debug: debugView };

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
