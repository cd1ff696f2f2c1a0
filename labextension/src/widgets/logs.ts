import { widget } from "./widget";
import { logView } from "../views/logs";

export default widget(logView);
