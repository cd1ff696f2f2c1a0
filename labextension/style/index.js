import "../../kernel_ext/monarch_kernel/views/static/style.css";
import "../../kernel_ext/monarch_kernel/views/static/debugger.css";
import "./panel.css";
