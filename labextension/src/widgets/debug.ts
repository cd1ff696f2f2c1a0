import { widget } from "./widget";
import { debugView } from "../views/debugger";

export default widget(debugView);
