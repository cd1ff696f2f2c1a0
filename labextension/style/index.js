import "../../kernel_ext/monarch_kernel/faces/static/style.css";
import "../../kernel_ext/monarch_kernel/faces/static/debugger.css";
import "./panel.css";
