// Keeps a page's live area current: the server sends the parts that differ, and ticks by which the page knows its data's age.
"use strict";

// Without a tick for as long, the home doesn't answer.
const OLD_S = 5;
// Older data shows its age.
const FRESH_S = 3;
// How long after the end of a connection to the home the page makes another one.
const AGAIN_S = 2;

// Change one element to be like another, without replacing what stays: focus, selection and open details remain.
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  morphChildren(old, fresh);
}

function morphChildren(old, fresh) {
  const wanted = [...fresh.childNodes];
  const byId = new Map([...old.children].filter((node) => node.id).map((node) => [node.id, node]));
  wanted.forEach((node, index) => {
    const at = old.childNodes[index] ?? null;
    const same = node.id ? byId.get(node.id) : undefined;
    if (same) {
      // A row that moves keeps its focus where the browser can do that.
      if (same !== at) (old.moveBefore ?? old.insertBefore).call(old, same, at);
      morph(same, node);
    } else if (at === null || node.id || at.id) old.insertBefore(node, at);
    else morph(at, node);
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

function ageWords(seconds) {
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  return seconds < 7200 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}

function watch(live) {
  const age = document.getElementById("age");
  const title = document.title;
  const said = document.getElementById("said");
  let heardAt = performance.now();
  let takenAt = heardAt - 1000 * Number(age.dataset.age);
  let events;
  function connect(version) {
    events = new EventSource(`/console/events?${new URLSearchParams({ path: live.dataset.path, version })}`);
    events.addEventListener("whole", (event) => morphChildren(live, parsed(JSON.parse(event.data).live)));
    events.addEventListener("parts", (event) => {
      for (const [id, html] of Object.entries(JSON.parse(event.data))) {
        const part = document.getElementById(id);
        const fresh = parsed(html).firstElementChild;
        if (part && fresh) morph(part, fresh);
      }
    });
    events.addEventListener("tick", (event) => {
      const { age_s: ageS, troubles } = JSON.parse(event.data);
      heardAt = performance.now();
      takenAt = heardAt - 1000 * ageS;
      document.title = troubles ? `(${troubles}) ${title}` : title;
      show();
    });
    events.addEventListener("problem", () => location.reload());
    // A browser's own attempts end at an answer such as a proxy's 502, and name the version that the page began with, which
    // it may no longer show.
    events.onerror = () => {
      events.close();
      setTimeout(reconnect, 1000 * AGAIN_S);
    };
  }
  // Sessions end when the server starts again: the page then leads to the login.
  async function reconnect() {
    const answer = await fetch("/console/events", { method: "HEAD" }).catch(() => null);
    if ([401, 403].includes(answer?.status)) location.reload();
    else connect("");
  }
  connect(live.dataset.version);
  let wasOld = false;
  function show() {
    const now = performance.now();
    const isOld = now - heardAt > 1000 * OLD_S;
    const seconds = (now - takenAt) / 1000;
    const words = isOld ? `✖ no answer: data of ${ageWords(seconds)} ago` : seconds < FRESH_S ? "live" : `data of ${ageWords(seconds)} ago`;
    if (age.textContent !== words) age.textContent = words;
    age.classList.toggle("old", isOld);
    if (isOld !== wasOld) said.textContent = isOld ? "The home doesn't answer." : "The home answers again.";
    wasOld = isOld;
  }
  setInterval(show, 1000);
  // A page that is left must not hold one of the browser's few connections to the home.
  addEventListener("pagehide", () => events.close());
  addEventListener("pageshow", (event) => {
    if (event.persisted) location.reload();
  });
}

// Return an element; texts among the children stay texts.
function element(name, properties, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

const OPS = { c: "insert into", u: "update of", d: "delete from", r: "copied row of", t: "truncate of", x: "partition left", m: "message", s: "definition of" };

function text(row, name) {
  if (!row || !Object.hasOwn(row, name)) return "";
  const value = row[name];
  return value === null ? "NULL" : typeof value === "string" ? value : JSON.stringify(value);
}

// A record that opens with all its fields; its table is made when it opens for the first time.
function recordItem(record) {
  const { row, before, stream, table, ...rest } = record;
  const title = element("strong", {}, `${OPS[record.op] ?? record.op} ${table ?? "message"}`);
  const details = element("details", {}, element("summary", {}, title, ` number ${record.seq.toLocaleString("en")}, ${record.commit_ts ?? ""}`));
  details.addEventListener("toggle", () => {
    const names = [...new Set([...Object.keys(row ?? {}), ...Object.keys(before ?? {})])];
    const rows = names.map((name) => {
      const isChanged = before && row && Object.hasOwn(before, name) && Object.hasOwn(row, name) && text(before, name) !== text(row, name);
      const cells = [before, row].map((values) => element("td", {}, text(values, name)));
      return element("tr", { className: isChanged ? "changed" : "" }, element("th", { scope: "row" }, name), ...cells);
    });
    const heads = ["Column", "Before", "After"].map((head) => element("th", { scope: "col" }, head));
    const parts = [element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)];
    const facts = element("p", { className: "note" }, element("code", {}, JSON.stringify(rest)));
    details.append(element("div", { className: "scroll" }, element("table", {}, ...parts)), facts);
  }, { once: true });
  return element("li", {}, details);
}

function tail(section) {
  const [form, note, list] = ["form", "p", "ol"].map((name) => section.querySelector(name));
  const button = form.querySelector("button");
  const shown = Number(section.dataset.shown);
  let events = null;
  let waiting = [];
  let count = 0;
  function stop(words) {
    events?.close();
    events = null;
    button.textContent = "Start";
    note.textContent = words;
    document.getElementById("said").textContent = words;
  }
  // At most one change of the page a frame, however many records come.
  function flush() {
    list.prepend(...waiting.slice(-shown).reverse().map(recordItem));
    while (list.childElementCount > shown) list.lastElementChild.remove();
    waiting = [];
    if (events) note.textContent = `${count.toLocaleString("en")} records, the newest ${shown} are shown.`;
  }
  form.addEventListener("submit", (submitted) => {
    submitted.preventDefault();
    if (events) return stop("Stopped.");
    const parameters = new URLSearchParams([...new FormData(form)].filter(([, value]) => value.trim()));
    list.replaceChildren();
    count = 0;
    button.textContent = "Stop";
    note.textContent = "Waiting for records.";
    events = new EventSource(`/v1/streams/${encodeURIComponent(section.dataset.stream)}/tail?${parameters}`);
    events.onmessage = (event) => {
      if (!waiting.length) requestAnimationFrame(flush);
      waiting.push(JSON.parse(event.data));
      count += 1;
      // A page in the background draws no frames.
      if (waiting.length > 2 * shown) waiting = waiting.slice(-shown);
    };
    events.addEventListener("problem", (event) => {
      const { code, detail, hint } = JSON.parse(event.data);
      stop(`${code}: ${detail}. ${hint ?? ""}`);
    });
    events.onerror = () => {
      if (events.readyState === EventSource.CLOSED) explain(events.url);
    };
  });
  // An event source doesn't show the answer that refuses it.
  async function explain(url) {
    const refusing = new AbortController();
    const answer = await fetch(url, { signal: refusing.signal });
    const words = answer.ok ? "Stopped; start it again." : await answer.json().then(({ code, detail, hint }) => `${code}: ${detail}. ${hint ?? ""}`);
    refusing.abort();
    stop(words);
  }
  addEventListener("pagehide", () => events?.close());
}

// Show a chart's numbers at the pointer, or where the arrow keys lead: they are read in the table of all numbers.
function readCharts(live) {
  let at = null;
  function rows() {
    return [...document.querySelectorAll("#numbers tbody tr")];
  }
  function show(plot, row) {
    const heads = document.querySelectorAll("#numbers thead th");
    const words = plot.dataset.columns.split(" ").map((column) => {
      const title = heads[column].textContent.split(": ")[1];
      return `${title} ${row.cells[column].textContent || "unknown"}`;
    });
    for (const other of document.querySelectorAll(".plot.read")) if (other !== plot) hide(other);
    at = Number(row.dataset.at);
    plot.style.setProperty("--at", `${100 * at}%`);
    plot.classList.add("read");
    plot.closest("figure").querySelector("output").textContent = `${row.cells[0].textContent}: ${words.join(", ")}`;
  }
  function hide(plot) {
    plot.classList.remove("read");
    plot.closest("figure").querySelector("output").textContent = "";
  }
  live.addEventListener("pointermove", (event) => {
    const plot = event.target.closest(".plot");
    if (!plot) return;
    const box = plot.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width;
    const away = (row) => Math.abs(Number(row.dataset.at) - place);
    const nearest = rows().reduce((best, row) => (away(row) < away(best) ? row : best));
    if (Number(nearest.dataset.at) !== at || !plot.classList.contains("read")) show(plot, nearest);
  });
  live.addEventListener("pointerout", (event) => {
    const plot = event.target.closest(".plot");
    if (plot && !plot.contains(event.relatedTarget)) hide(plot);
  });
  live.addEventListener("focusout", (event) => event.target.matches(".plot") && hide(event.target));
  live.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: 1, ArrowRight: -1 }[event.key];
    if (!step || !event.target.matches(".plot")) return;
    event.preventDefault();
    const all = rows();
    const now = event.target.classList.contains("read") ? all.findIndex((row) => Number(row.dataset.at) === at) : -1;
    show(event.target, all[Math.min(Math.max(now + step, 0), all.length - 1)]);
  });
}

// Words that may follow a table's name in SQL, and are no alias of it.
const NO_ALIASES = new Set("anti,asof,cross,except,for,full,group,having,inner,intersect,join,lateral,left,limit,natural,offset,on,order,positional,qualify,right,semi,tablesample,union,using,where,window".split(","));

// Complete names of tables, columns and aliases in the query: the arrows choose one, Enter takes it, Escape closes the list.
function completeNames(field, form) {
  const list = element("ul", { id: "names", hidden: true });
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Names");
  field.setAttribute("aria-autocomplete", "list");
  field.setAttribute("aria-controls", list.id);
  const label = field.closest("label");
  const box = element("div", { className: "completed" });
  label.replaceWith(box);
  box.append(label, list);
  let chosen = -1;
  function quoted(name) {
    return /^[a-z_][a-z0-9_$]*$/.test(name) ? name : `"${name.replaceAll('"', '""')}"`;
  }
  // Columns by the aliases that the query gives a table, its history or its merged rows.
  function byAlias({ dataset }) {
    const columns = JSON.parse(dataset.columns).map(quoted);
    return [dataset.table, ...views({ dataset })].flatMap((table) => {
      const named = new RegExp(`${table.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}\\s+(?:as\\s+)?("(?:[^"]|"")+"|[\\w$]+)`, "gi");
      const aliases = [...field.value.matchAll(named)].map(([, alias]) => alias).filter((alias) => !NO_ALIASES.has(alias.toLowerCase()));
      return aliases.flatMap((alias) => columns.map((column) => `${alias}.${column}`));
    });
  }
  function views({ dataset }) {
    return ["history", ...("merged" in dataset ? ["merged"] : [])].map((view) => `${view}."${dataset.table.replaceAll('"', '""')}"`);
  }
  function names() {
    const own = [...document.querySelectorAll("li[data-columns]")].filter(({ dataset }) => dataset.stream === form.elements.stream.value);
    // Columns of tables that the query names come first.
    const named = own.filter(({ dataset }) => field.value.includes(dataset.table));
    const columns = [...named, ...own].flatMap(({ dataset }) => JSON.parse(dataset.columns).map(quoted));
    const tables = own.map(({ dataset }) => dataset.table);
    return [...new Set([...own.flatMap(byAlias), ...(named.length ? columns : []), ...tables, ...own.flatMap(views), ...columns])];
  }
  function word() {
    return field.value.slice(0, field.selectionStart).match(/["\w$.]*$/)[0];
  }
  function close() {
    list.hidden = true;
    list.replaceChildren();
    field.removeAttribute("aria-activedescendant");
    chosen = -1;
  }
  function choose(index) {
    chosen = (index + list.childElementCount) % list.childElementCount;
    [...list.children].forEach((item, at) => item.setAttribute("aria-selected", at === chosen));
    field.setAttribute("aria-activedescendant", list.children[chosen].id);
    list.children[chosen].scrollIntoView({ block: "nearest" });
  }
  function take(name) {
    field.setRangeText(name, field.selectionStart - word().length, field.selectionStart, "end");
    close();
    field.focus();
  }
  field.addEventListener("input", () => {
    const begun = word().toLowerCase();
    close();
    if (!begun) return;
    // By any part of its name; a view of a table by its whole name, or each table would be there twice.
    const parts = (name) => (/^(history|merged)\./.test(name) ? [] : name.split(".").slice(1));
    const fits = (name) => name.toLowerCase() !== begun && [name, name.replaceAll('"', ""), ...parts(name)].some((one) => one.toLowerCase().startsWith(begun) || one.replace(/^\W+/, "").startsWith(begun));
    const found = names().filter(fits).slice(0, 10);
    found.forEach((name, at) => {
      const item = element("li", { id: `name-${at}`, onmousedown: (event) => event.preventDefault(), onclick: () => take(name) }, name);
      item.setAttribute("role", "option");
      item.setAttribute("aria-selected", "false");
      list.append(item);
    });
    list.hidden = !found.length;
  });
  field.addEventListener("keydown", (event) => {
    if (list.hidden) return;
    if (event.key === "Escape") close();
    else if (event.key === "ArrowDown") choose(chosen + 1);
    else if (event.key === "ArrowUp") choose(chosen < 0 ? -1 : chosen - 1);
    else if (event.key === "Enter" && chosen >= 0) take(list.children[chosen].textContent);
    else return;
    event.preventDefault();
  });
  field.addEventListener("blur", close);
}

const live = document.getElementById("live");
if (live) {
  watch(live);
  readCharts(live);
}
const section = document.getElementById("tail");
if (section) tail(section);
const sql = document.querySelector("textarea[name=sql]");
if (sql) completeNames(sql, sql.form);
