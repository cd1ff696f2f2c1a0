import { widget } from "./widget";
import { panelView } from "../panel/cellpanel";

export default widget(panelView);
