// What the widgets in cells have already: one client of the store, one set of words, one style.

export { EMPTY, Cluster, actorsOn, applyPatch, baseOf, indexOfBase, pointOf, rankOf, sliceExpression } from "../../kernel_ext/monarch_kernel/views/static/cluster.js";
export type { Channel } from "../../kernel_ext/monarch_kernel/views/static/cluster.js";
export { SIGNS, STATES, bytes, clock, duration, h, placeOf, plural, say, shapeOf } from "../../kernel_ext/monarch_kernel/views/static/words.js";
export { debugView } from "../../kernel_ext/monarch_kernel/views/static/debugger.js";
export { failureView } from "../../kernel_ext/monarch_kernel/views/static/failures.js";
export { logView } from "../../kernel_ext/monarch_kernel/views/static/logs.js";
