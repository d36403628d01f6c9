"""`mini`: Chinese reviews written for this project, made by a small grammar. Nothing here is copied from a data set.

A review is two to four clauses about one domain. A clause praises or blames an aspect plainly ("房间很干净"), by
negating the opposite ("房间一点也不脏"), or by telling what happened ("前台主动帮我们升级了房型"). Negation and
concession ("虽然…但是…") make the words that occur a poor guide to the label, and a few reviews name one good and
one bad thing and leave it at that, as people do: their label is a coin toss, so nobody reaches 100%.

The corpus is the same on every machine and in every Python version: it draws from `random.Random(seed).random()`
alone, whose sequence Python guarantees.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

TRAIN_ROWS, DEV_ROWS, TEST_ROWS = 20_000, 1_000, 1_000
POSITIVE, NEGATIVE = 1, 0
SEED = 20_240


@dataclass(frozen=True)
class Aspect:
    """What a clause talks about, with adjectives that follow 很 and 不: praise and the blame opposite to it."""

    nouns: str
    praise: str
    blame: str


@dataclass(frozen=True)
class Domain:
    openers: str
    aspects: tuple[Aspect, ...]
    good_events: str
    bad_events: str
    good_endings: str
    bad_endings: str


HOTEL = Domain(
    openers="上周出差住的这家酒店 国庆和家人一起入住 第二次住这里 半夜才到店 公司统一订的酒店 带孩子来玩住了两晚 "
    "图离车站近订的 在网上看了照片才订 住的是标准间 订的是海景房 陪父母旅游时住的 临时改行程订了一晚",
    aspects=(
        Aspect("房间 客房 卫生间 床单 走廊", "干净 整洁 清爽", "脏 乱 潮湿"),
        Aspect("房间 大堂 浴室", "宽敞 明亮 舒适", "小 暗 陈旧"),
        Aspect("床 枕头 床垫", "舒服 柔软 结实", "硬 塌 破旧"),
        Aspect("前台 服务员 保安 店里的人", "热情 周到 耐心", "冷淡 傲慢 敷衍"),
        Aspect("早餐 餐厅的菜", "丰富 可口 新鲜", "单调 难吃 油腻"),
        Aspect("周围 晚上 楼道里", "安静 安全 方便", "吵 乱 偏僻"),
        Aspect("价格 房价 停车费", "实惠 合理 划算", "贵 离谱 虚高"),
    ),
    good_events="前台主动帮我们升级了房型 退房时还送了一瓶水 行李有人一直帮忙提到房间 空调坏了十分钟就修好了 "
    "知道孩子发烧马上送来了药 延迟退房也没有多收钱 打扫阿姨把落下的耳机送了回来",
    bad_events="办入住排了一个多小时的队 半夜隔壁装修吵得睡不着 洗澡洗到一半没有热水 打了三次电话也没人送毛巾 "
    "床单上有好几根头发 押金过了半个月还没有退 空调响了一夜也没人来修",
    good_endings="下次出差还住这里 会推荐给同事 住得很满意 对得起这个价钱 以后来这座城市就选它了",
    bad_endings="下次不会再住这里 不会推荐给同事 住得很失望 对不起这个价钱 以后来这座城市也不选它了",
)

BOOK = Domain(
    openers="朋友推荐买的这本书 花了两个晚上读完 给孩子买的 冲着作者的名气买的 考试前买来复习用 翻了前三章 "
    "等了很久才到货的新版 在图书馆借过后又买了一本 作为生日礼物买的 看到书评就下了单",
    aspects=(
        Aspect("内容 故事 情节 书里的例子", "精彩 充实 生动", "空洞 老套 枯燥"),
        Aspect("文字 语言 译文", "流畅 通顺 优美", "生硬 费解 重复"),
        Aspect("纸张 印刷 装订 封面", "精美 清晰 结实", "粗糙 模糊 单薄"),
        Aspect("讲解 结构 作者的思路", "清楚 严谨 深入", "混乱 肤浅 跳跃"),
        Aspect("插图 排版 字体", "漂亮 讲究 清晰", "难看 拥挤 粗糙"),
        Aspect("价格 定价", "便宜 合理 实惠", "贵 离谱 虚高"),
    ),
    good_events="读到最后一章忍不住哭了 孩子一口气看了三遍 书里的方法当天就用上了 包装里还夹了一张书签 "
    "看完又把作者的另外几本也买了 好几个困惑很久的问题都想通了",
    bad_events="翻了十几页就发现好几处错字 中间少了整整八页 收到时书角已经压坏了 看了三遍也没明白作者想说什么 "
    "孩子看了两页就丢在一边 大半本都在重复前面的话",
    good_endings="值得收藏 会推荐给身边的朋友 买得很值 以后还会买这个作者的书 读完收获很大",
    bad_endings="不值得收藏 不会推荐给身边的朋友 买得很亏 以后不会买这个作者的书 读完没什么收获",
)

LAPTOP = Domain(
    openers="用了一个月的笔记本 给女儿上大学买的电脑 公司配的这台机器 活动时抢到的 换掉了用了六年的旧电脑 "
    "主要用来写代码 平时就上网看电影 收到货先跑了一遍测试 在实体店看过才下单 买来剪视频用的",
    aspects=(
        Aspect("开机 系统 打开软件", "快 流畅 顺畅", "慢 卡 迟钝"),
        Aspect("屏幕 显示效果 画面", "清晰 细腻 亮", "暗 模糊 偏色"),
        Aspect("键盘 触摸板 手感", "舒服 灵敏 扎实", "硬 松 别扭"),
        Aspect("风扇 机器 玩游戏时", "安静 凉快 省电", "吵 烫 费电"),
        Aspect("电池 续航 待机", "持久 靠谱 出色", "短 差 可怜"),
        Aspect("做工 外壳 外观", "精致 漂亮 结实", "粗糙 廉价 单薄"),
        Aspect("客服 售后", "专业 耐心 负责", "敷衍 冷淡 拖拉"),
    ),
    good_events="开着十几个程序也不卡 客服远程帮忙装好了系统 充一次电用了一整天 第二天一早就送到了 "
    "同时编译和开会都没有停顿 拆开加内存只用了五分钟",
    bad_events="用了三天就蓝屏了两次 屏幕右下角有一个坏点 充电器烫得不敢用手碰 玩一会儿游戏就自动关机 "
    "寄回去修了一个月还没修好 买完一个星期就降价五百",
    good_endings="这个价位很值得买 用起来很省心 给它打五分 准备再给家里买一台 没有买错",
    bad_endings="这个价位很不值得买 用起来很闹心 只能打一分 不准备再买这个牌子 算是买错了",
)

DELIVERY = Domain(
    openers="中午加班点的外卖 第一次在这家点 下雨天点的 和同事拼单点了五份 晚上十点多下的单 点的是招牌套餐 "
    "看评分高才点的 这家吃了快半年 周末懒得做饭就点了 给生病的室友点的粥",
    aspects=(
        Aspect("味道 汤 米饭 招牌菜", "鲜美 可口 香", "咸 淡 难吃"),
        Aspect("送餐 配送 出餐", "快 准时 及时", "慢 拖拉 随意"),
        Aspect("分量 菜量 肉", "足 实在 多", "少 可怜 小"),
        Aspect("包装 餐盒 袋子", "严实 干净 讲究", "简陋 脏 随便"),
        Aspect("食材 青菜 鱼 水果", "新鲜 干净 嫩", "老 蔫 腥"),
        Aspect("骑手 店家 接电话的人", "客气 热情 细心", "粗鲁 冷淡 马虎"),
        Aspect("价格 配送费", "实惠 划算 合理", "贵 离谱 虚高"),
    ),
    good_events="打开盖子还冒着热气 备注少放辣真的照做了 多送了一份小菜 骑手冒着大雨还提前到了 "
    "漏了饮料马上就补送过来 一家三口吃得干干净净",
    bad_events="等了一个半小时才送到 汤洒了一袋子 菜里吃出一根头发 备注不要香菜结果放了一大把 "
    "送来的和图片完全两样 吃完当天晚上就拉肚子 打电话催了四次都没人接",
    good_endings="明天还点这家 已经收藏了 吃得很满意 推荐大家试试 会一直点下去",
    bad_endings="以后再也不点这家 已经拉黑了 吃得很不满意 不推荐大家试 不会有下一次了",
)

PHONE = Domain(
    openers="用了两个星期的手机 给爸妈换的新手机 预售当天抢的 从别的牌子换过来 当备用机买的 老婆的生日礼物 "
    "主要用来拍照 每天要接很多电话 收到后先贴了膜 犹豫了很久才买",
    aspects=(
        Aspect("拍照 夜景 照片", "清晰 自然 好看", "模糊 失真 难看"),
        Aspect("系统 滑动 反应", "流畅 快 稳定", "卡 慢 迟钝"),
        Aspect("电池 续航", "持久 靠谱 出色", "差 短 可怜"),
        Aspect("信号 网络 蓝牙", "稳定 强 可靠", "弱 差 混乱"),
        Aspect("手感 机身 外观", "漂亮 轻巧 精致", "笨重 廉价 难看"),
        Aspect("声音 听筒 音质", "清楚 响亮 好听", "小 刺耳 沙哑"),
        Aspect("物流 客服 售后", "及时 周到 靠谱", "慢 敷衍 拖拉"),
    ),
    good_events="充半个小时就够用一天 掉在地上两次都没坏 老人拿到手就会用 旧手机里的东西一键就搬完了 "
    "在地铁里打电话也听得见 换屏只花了二十分钟",
    bad_events="半天不到就没电了 打游戏十分钟就烫手 用了一周屏幕就出现了绿线 收到的盒子明显被人拆过 "
    "接电话经常听不到对方说什么 更新以后天天自动重启",
    good_endings="推荐购买 这次没有失望 全家都准备换它 五分好评 比上一部强多了",
    bad_endings="不推荐购买 这次很失望 全家都劝我退掉 只给一分 比上一部差多了",
)

RESTAURANT = Domain(
    openers="周末和朋友聚餐 排队等位才吃上的这家店 路过看见人多就进去了 公司年会在这里办的 带外地同学来吃 "
    "点评上排名第一的店 结婚纪念日来的 午市套餐 开业那天来过一次 四个人点了六个菜",
    aspects=(
        Aspect("味道 烤鱼 点心 火锅底", "正宗 鲜美 地道", "腻 咸 普通"),
        Aspect("服务员 店员 老板", "热情 周到 利落", "冷淡 懒散 粗心"),
        Aspect("环境 包间 桌子", "干净 雅致 宽敞", "脏 吵 拥挤"),
        Aspect("上菜 结账 等位", "快 顺利 有序", "慢 混乱 拖拉"),
        Aspect("价格 人均 酒水", "合理 实惠 划算", "贵 离谱 虚高"),
        Aspect("分量 菜量", "足 实在 大", "少 小 可怜"),
    ),
    good_events="知道是过生日还送了长寿面 服务员一直记得加水 孩子把一盘虾全吃光了 老板亲自出来问合不合口味 "
    "临走还给老人打包了汤 多点的菜提醒我们退掉了",
    bad_events="等了四十分钟才上第一个菜 结账时多算了一道菜 鱼明显是死了很久的 盘子边上还有没洗掉的油 "
    "叫了五遍服务员都没有人理 订好的包间到店说没有了",
    good_endings="下次聚会还来 吃得很开心 值得专门跑一趟 会带家人再来 对得起排的队",
    bad_endings="下次聚会不会来 吃得很窝火 不值得专门跑一趟 不会带家人再来 白白排了队",
)

CLOTHES = Domain(
    openers="给自己买的外套 换季时买的鞋 看直播下的单 按平时的尺码买的 洗过两次以后来评价 给儿子买的校服 "
    "运动时穿的 第三次回购 面试前急着买的衬衫 天冷了买的毛衣",
    aspects=(
        Aspect("面料 布料 里子", "柔软 厚实 舒服", "硬 薄 扎人"),
        Aspect("做工 针脚 拉链", "精细 结实 讲究", "粗糙 松 马虎"),
        Aspect("颜色 款式 上身效果", "好看 大方 显瘦", "难看 土 显胖"),
        Aspect("尺码 版型 鞋底", "合适 标准 舒服", "偏大 窄 磨脚"),
        Aspect("发货 快递 客服", "快 细心 及时", "慢 敷衍 拖拉"),
        Aspect("价格 活动价", "便宜 实惠 划算", "贵 离谱 虚高"),
    ),
    good_events="洗了好几次也没有变形 同事都来问在哪里买的 穿着跑了十公里脚也不疼 换货当天就寄出来了 "
    "孩子穿上就不肯脱下来 比商场里同样的便宜一半",
    bad_events="洗一次就掉了一盆颜色 穿了两天袖口就开线 发来的颜色根本不对 退货要自己出运费 "
    "拆开一股刺鼻的味道 左右两只大小都不一样",
    good_endings="会再买一件 很适合平时穿 绝对值这个价 已经推荐给朋友 放心下单吧",
    bad_endings="不会再买第二件 根本不适合平时穿 绝对不值这个价 已经申请退货 大家小心下单吧",
)

DOMAINS = (HOTEL, BOOK, LAPTOP, DELIVERY, PHONE, RESTAURANT, CLOTHES)

# {n} noun; {a} adjective of the clause's own polarity; {o} adjective of the opposite one.
PLAIN_PRAISE = ("{n}很{a}", "{n}非常{a}", "{n}挺{a}的", "{n}特别{a}", "{n}比想象中{a}", "{n}一直很{a}", "{n}相当{a}")
PLAIN_BLAME = ("{n}很{a}", "{n}太{a}了", "{n}有点{a}", "{n}实在{a}", "{n}比想象中{a}", "{n}总是很{a}", "{n}特别{a}")
NEGATED_PRAISE = ("{n}一点也不{o}", "{n}并不{o}", "{n}没有别人说的那么{o}", "我不觉得{n}{o}", "{n}完全不{o}")
NEGATED_BLAME = ("{n}一点也不{o}", "{n}不够{o}", "{n}没有宣传的那么{o}", "{n}谈不上{o}", "我不觉得{n}{o}")
MILD_GOOD = "整体还行 总体还可以 算是不错了 没什么大毛病 基本满意 比预期好一些 还算用心"
MILD_BAD = "整体一般般 总体不太行 算不上好 小毛病不少 基本没法满意 比预期差一些 还差点用心"
CONCEDE = (
    "虽然{weak}，但是{strong}",
    "虽说{weak}，可是{strong}",
    "{weak}，不过{strong}",
    "尽管{weak}，{strong}",
    "{strong}，虽然{weak}",
    "除了{weak}，别的都{verdict}",
)
UNDECIDED = (
    "优点是{good}，缺点是{bad}",
    "好的地方是{good}，不好的地方是{bad}",
    "{good}，{bad}",
    "{bad}，{good}",
)
COMMAS = ("，", "，", "，", "。")
CLOSERS = ("。", "。", "。", "！", "")


class _Writer:
    """Draws reviews; every choice is one call of `Random.random`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def below(self, bound: int) -> int:
        return int(self._random.random() * bound)

    def one_of(self, options: str | Sequence[str]) -> str:
        words = options.split() if isinstance(options, str) else options
        return words[self.below(len(words))]

    def shuffled(self, items: list[tuple[str, int]]) -> list[tuple[str, int]]:
        items = list(items)
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
        return items

    def clause(self, domain: Domain, label: int) -> str:
        good = label == POSITIVE
        if self.chance(0.2):
            return self.one_of(domain.good_events if good else domain.bad_events)
        aspect = domain.aspects[self.below(len(domain.aspects))]
        own, opposite = (aspect.praise, aspect.blame) if good else (aspect.blame, aspect.praise)
        if self.chance(0.25):
            form = self.one_of(NEGATED_PRAISE if good else NEGATED_BLAME)
        else:
            form = self.one_of(PLAIN_PRAISE if good else PLAIN_BLAME)
        return form.format(n=self.one_of(aspect.nouns), a=self.one_of(own), o=self.one_of(opposite))

    def ending(self, domain: Domain, label: int) -> str:
        if self.chance(0.3):
            return self.one_of(MILD_GOOD if label == POSITIVE else MILD_BAD)
        return self.one_of(domain.good_endings if label == POSITIVE else domain.bad_endings)

    def clauses(self, domain: Domain, label: int) -> list[str]:
        kind = self._random.random()
        if kind < 0.05:
            pair = {"good": self.clause(domain, POSITIVE), "bad": self.clause(domain, NEGATIVE)}
            return [self.one_of(UNDECIDED).format(**pair)]
        if kind < 0.35:
            conceded = self.one_of(CONCEDE).format(
                weak=self.clause(domain, 1 - label),
                strong=self.clause(domain, label),
                verdict=self.one_of("很好 不错 满意" if label == POSITIVE else "很糟 不行 失望"),
            )
            return [conceded, self.ending(domain, label)] if self.chance(0.6) else [conceded]
        first, second = self.clause(domain, label), self.clause(domain, label)
        if first == second or self.chance(0.25):
            return [first, self.ending(domain, label)]
        return [first, second, self.ending(domain, label)] if self.chance(0.5) else [first, second]

    def review(self, label: int) -> str:
        domain = DOMAINS[self.below(len(DOMAINS))]
        parts = self.clauses(domain, label)
        if self.chance(0.6):
            parts.insert(0, self.one_of(domain.openers))
        text = parts[0]
        for part in parts[1:]:
            text += self.one_of(COMMAS) + part
        return text + self.one_of(CLOSERS)


def generate(seed: int = SEED) -> dict[str, list[tuple[str, int]]]:
    """The splits `train`, `dev` and `test` as lists of (text, label): half of each positive, no text twice anywhere."""
    writer = _Writer(seed)
    seen: set[str] = set()
    splits: dict[str, list[tuple[str, int]]] = {}
    for name, size in (("train", TRAIN_ROWS), ("dev", DEV_ROWS), ("test", TEST_ROWS)):
        rows: list[tuple[str, int]] = []
        while len(rows) < size:
            label = POSITIVE if len(rows) % 2 else NEGATIVE
            text = writer.review(label)
            if text not in seen:
                seen.add(text)
                rows.append((text, label))
        splits[name] = writer.shuffled(rows)
    return splits
