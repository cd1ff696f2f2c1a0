import { widget } from "./widget";
import { timelineView } from "../views/timeline";

export default widget(timelineView);
